"""PTX instructions as functions of numba.cuda."""
