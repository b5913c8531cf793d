"""A configuration: its schema, where its values come from, templates."""
