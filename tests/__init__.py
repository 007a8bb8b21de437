import os

# Several processes share the machine in many tests. Waiting threads of OpenMP would take most of it, since
# each spins for a millisecond. libgomp reads this when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
