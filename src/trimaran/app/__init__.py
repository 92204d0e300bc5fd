"""What people touch: the command line. Only this room prints, and nothing imports it."""
