"""What is looked at before money is spent, one file each."""
