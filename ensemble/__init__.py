"""How experts are combined, scored and used."""
