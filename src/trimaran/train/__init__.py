"""Inside the worker: the trainer, its steppers, loss, optimizer and schedule."""
