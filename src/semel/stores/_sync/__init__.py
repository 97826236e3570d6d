"""Store code for threads, generated from the code for tasks by `make generate`."""
