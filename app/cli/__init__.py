"""What an operator does at a shell."""
