"""Many keys at once on asyncio, where `test_doubt` has the same for threads."""

from __future__ import annotations

import pytest

from semel import AsyncIdempotency, InvalidKey


async def test_one_text_is_not_taken_for_many_keys():
    async with AsyncIdempotency("memory://") as idem:
        for many in (idem.marks.set_many, idem.marks.check_many, idem.marks.delete_many):
            with pytest.raises(InvalidKey, match="a str would be split"):
                await many("abc")
        assert [record async for record in idem.records()] == []
