"""What n-gram tables say of the decisions on a byte's path."""
