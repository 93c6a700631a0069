"""The processes in which answers are run and judged, and the walls around them."""
