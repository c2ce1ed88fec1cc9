"""The tools of the demo, as they run in their image. Standard library only."""
