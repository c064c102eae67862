"""The engines. Each module is imported only when its engine is chosen: they need packages that others do without."""
