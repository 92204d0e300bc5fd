"""What a rank measures of its steps."""
