"""Arrays in, arrays out: random numbers, resident loops, forward passes."""
