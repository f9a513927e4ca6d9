"""The routes that a container for Amazon SageMaker must have, besides /ping."""
