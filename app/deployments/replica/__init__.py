"""What runs beside an engine."""
