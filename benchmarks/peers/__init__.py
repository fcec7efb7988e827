"""The same work in other libraries, each a program of its own: nothing in here imports numstack."""
