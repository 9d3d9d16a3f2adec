"""HTTP: routes, bodies, answers and errors."""
