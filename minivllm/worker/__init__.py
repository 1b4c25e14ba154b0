"""The half that computes: it owns every tensor and the device, and does what a StepPlan says. It never decides who runs."""
