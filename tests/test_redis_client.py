"""Commands of asyncio clients whose task is cancelled."""

import asyncio

from penstock.redis.client import async_redis_client


def test_a_task_that_is_cancelled_at_any_step_of_a_command_ends(redis_url: str) -> None:
    async def cancel_at(step: int) -> bool:
        """Cancel a command after so many turns of the event loop; return whether it had not ended by itself."""
        client = async_redis_client(redis_url)
        command = asyncio.ensure_future(client.get("nothing"))
        for _ in range(step):
            await asyncio.sleep(0)
        was_open = command.cancel()
        await asyncio.wait([command])
        assert command.cancelled() == was_open, step
        assert await client.ping(), "the next command has its own reply"
        await client.aclose()
        return was_open

    async def cancel_at_each() -> None:
        for step in range(200):  # a command that nobody cancels takes about 20
            if not await cancel_at(step):
                break

    asyncio.run(cancel_at_each())
