"""headrace: carries data to a model."""
