"""On PYTHONPATH, this ends a rank as CLEARLLAMA_TEST_FAULT specifies: RANK PHASE HOW."""

import os

fault = os.environ.get("CLEARLLAMA_TEST_FAULT")
if fault and os.environ.get("RANK") == fault.split()[0]:
    from llama import loader
    from llama.engine import parallel

    _, phase, how = fault.split()
    sums = 0

    def end(*args: object) -> None:
        if how.startswith("raise"):
            raise MemoryError("simulated")
        if how == "kill":
            os.kill(os.getpid(), 9)
        os._exit(int(how))

    def counted(world: parallel.World, x: object, plain: object = parallel.World.sum) -> object:
        global sums
        sums += 1  # 5 per forward pass of a model with 2 layers
        if sums == {"prefill": 3, "decode": 33}[phase]:
            end()
        return plain(world, x)

    if phase == "load":
        loader.check_tensors = end
    else:
        parallel.World.sum = counted
