"""One file a loader; each drives its library as its own documentation says, through the same small interface (base.py)."""
