"""The room of draft heads: layers of a checkpoint that predict the tokens after the next one."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("features.speculation",),
    spec="tokserve.features.draft_heads.served:with_draft_head",
    draft="tokserve.features.draft_heads.head_drafts:load_draft",
)
