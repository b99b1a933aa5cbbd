"""New weights from trainer to engine on one device. Knows names, types, shapes and handles; no model, no engine."""
