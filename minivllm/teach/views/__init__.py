"""Views: live pictures of an engine's steps, made from its events. `minivllm.teach` has them by name."""
