"""Storage writer and reader for plain `torch.distributed.checkpoint`, usable without the rest of the framework.

    from framework.checkpoint import VolumeReader, VolumeWriter, per_rank

    state = {"app": AppState(model, optimizer), "step": step, "rng": per_rank(torch.get_rng_state())}
    dcp.save(state, storage_writer=VolumeWriter("s3://bucket/run/step_1000"))
    future = dcp.async_save(state, storage_writer=VolumeWriter("/mnt/runs/step_2000"))
    dcp.load(state, storage_reader=VolumeReader("s3://bucket/run/step_1000"))
    torch.set_rng_state(state["rng"].value)

A folder holds a checkpoint when `.metadata` is in it: that is written last. What is written is a stock checkpoint with
checksums beside it, so torch's own reader, `dcp_to_torch_save` and the like read it. torch raises an error of any rank
on all ranks as a `CheckpointException`, whose `failures` hold the `CheckpointError` of the rank.
"""
