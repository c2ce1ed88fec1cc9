"""The functional core: values in, values out; no I/O and no clock."""
