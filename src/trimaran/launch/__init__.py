"""Outside the worker: starts the ranks and watches over them. Meets them only through files and command lines."""
