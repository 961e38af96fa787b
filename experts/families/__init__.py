"""What an expert is: its weights, where they start, and the loop that trains one."""
