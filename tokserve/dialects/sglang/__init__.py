"""SGLang's HTTP dialect (`--sglang-api`): its routes as thin translations over the engine calls of the other routes.

`routes` is the table; `generate`, `sampling` and `reply` are POST /generate; `control` and `weights` what a trainer
calls; `introspection` what routers and health checks read.
"""
