"""An engine that owns backward and step, driven by the suite."""
