"""Three commands: `train` and `compare` train real models under mpjax, `bench` measures it side by side.

    python -m experiments.train gpt
    python -m experiments.compare resnet --seeds 3
    python -m experiments.bench loss_scale

`config` parses what is asked for, `tasks` pairs a model with its data, `loop` trains it, and the
rest watches and stores the results. What `bench` measures is in benchmarks/.
"""
