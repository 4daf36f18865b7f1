"""FSDP2 on two CPU ranks: what ranks with all parameters compute, in a state that any number of ranks goes on from."""

from conftest import metrics, on_ranks, train


def test_sharded_ranks_train_as_others_do_and_their_state_goes_anywhere(tmp_path):
    on_ranks(
        2,
        """
        import dataclasses
        from tests.run.test_training import CONFIG, batch
        from run.training import Training
        cpu, loaded = torch.device("cpu"), batch()
        torch._C._get_accelerator = lambda: torch.device("cuda")  # of a machine with GPUs, which are not asked for
        mine = tuple(crops[2 * rank : 2 * rank + 2] for crops in loaded.views)

        def training(**options):
            return Training(dataclasses.replace(CONFIG, depth=2, lr=1e-5, **options), cpu, ranks=2)

        def steps(training, groups):
            chosen = training.sample(loaded, 0)[:, 2 * rank : 2 * rank + 2]
            given = list(zip(*training.gather(mine, chosen)))
            return [float(training.step(*given[group], 0.5)[0][0]) for group in groups]

        def same(one, other):
            leaves = [torch.utils._pytree.tree_leaves(state) for state in (one, other)]
            for a, b in zip(*leaves, strict=True):
                if isinstance(a, torch.Tensor):
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)

        whole, sharded = training(), training(fsdp=True)
        assert len(sharded.flat.values) < 0.6 * len(whole.flat.values)
        for name, tensor in sharded.network.encoder.blocks[1].named_parameters():
            assert tensor.to_local().numel() < tensor.numel() * 0.6, name
        in_pieces = training(fsdp=True, accumulate=2)
        losses = steps(whole, range(2)), steps(sharded, range(2)), steps(in_pieces, range(2))
        for one, other, third in zip(*losses, strict=True):
            assert abs(one - other) < 1e-4 and abs(one - third) < 1e-4, (one, other, third)
        state = sharded.state_dict()
        same(whole.state_dict(), state)
        one, other = (x["optimizer"]["state"][0]["exp_avg"] for x in (in_pieces.state_dict(), state))
        assert (one - other).norm() < 1e-3 * other.norm()
        same(dict(whole.encoder().state_dict()), dict(sharded.encoder().state_dict()))
        assert (sharded.state_dict(keep=rank == 0)["optimizer"]["state"][0]["exp_avg"].numel() > 0) == (rank == 0)

        anew = training(fsdp=True)  # the state comes back exactly, and into a network that is not sharded
        anew.load_state_dict(state)
        unsharded = training()
        unsharded.load_state_dict(state)
        expected = steps(sharded, [2])
        assert steps(anew, [2]) == expected
        same(anew.state_dict(), sharded.state_dict())
        assert abs(steps(unsharded, [2])[0] - expected[0]) < 1e-4
        """,
        tmp_path,
    )


def test_a_sharded_run_of_two_nodes_can_be_continued_by_one_process(photos, tmp_path):
    """Nodes that see the images and the output folder, and not each other's caches."""
    nodes = tmp_path / "a", tmp_path / "b"
    for node in nodes:
        node.mkdir()
    more = "--ema", "0.9", "--clip", "norm", "--lr", "1e-4"
    often = "--eval-data", photos, "--knn-every", "0.5"
    train(photos, tmp_path / "run", "--fsdp", "--max-steps", "10", *often, *more, nodes=nodes)
    assert len(list(tmp_path.glob("[ab]/aps/*.index"))) == 1, "only one of them scans"
    said = train(photos, tmp_path / "run", "--max-steps", "14", *often, *more).stdout
    assert "steps 11 to 14" in said
    train(photos, tmp_path / "one", "--max-steps", "14", *often, *more)
    both = [
        {line["step"]: line["loss"] for line in metrics(tmp_path / name) if "loss" in line} for name in ("run", "one")
    ]
    for step in (3, 6, 9, 14):
        assert abs(both[0][step] - both[1][step]) < 2e-3
    measured = [line["step"] for line in metrics(tmp_path / "run") if "knn_trained" in line]
    assert measured == [8, 10, 14]
