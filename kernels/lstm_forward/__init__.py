"""Log-probabilities of bytes under many small recurrent experts."""
