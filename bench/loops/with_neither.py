"""The loop with `save_async`, `load` and `latest` alone."""

from typing import Any

from loops.training import Batches, new_state, train_step


def train(path: str, steps: int) -> Any:
    data = Batches()
    # begin
    import signal
    from pathlib import Path

    import shardkeep

    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    def number_of(path: Path) -> int:
        return int(path.name.removeprefix("step_"))

    def tidy_up() -> None:
        found = [one for one in Path(path).glob("step_*") if shardkeep.exists(one)]
        for one in sorted(found, key=number_of)[:-3]:
            if number_of(one) % 20:
                shardkeep.delete(one)

    def save(**metadata: Any) -> shardkeep.PendingSave:
        everything = {"state": state, "data": shardkeep.PerProcess(data.get_state()), "step": step}
        return shardkeep.save_async(Path(path) / f"step_{step}", everything, step=step, metadata=metadata)

    before = signal.signal(signal.SIGTERM, stop)
    newest, pending = shardkeep.latest(path), None
    if newest is None:
        state, step = new_state(), 0
    else:
        template = {"state": new_state(), "data": shardkeep.PerProcess(None), "step": 0}
        loaded = shardkeep.load(newest, template=template)
        state, step = loaded["state"], loaded["step"]
        data.set_state(loaded["data"])
    while step < steps and not stopping:
        state, loss = train_step(state, next(data))
        step += 1
        if step % 10 == 0:
            if pending is not None:
                pending.wait()
                tidy_up()
            pending = save(loss=loss)
    if pending is not None:
        pending.wait()
    if not shardkeep.exists(Path(path) / f"step_{step}"):
        save().wait()
    tidy_up()
    signal.signal(signal.SIGTERM, before)
    # end
    return state
