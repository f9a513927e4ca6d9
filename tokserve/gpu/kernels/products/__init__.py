"""Parts of matrix products: how tiles follow one another, and products whose inputs a warp of their own fetches."""
