def check_elementwise(optimizer, *, elementwise): pass
