"""Training: from a loss to a new state, or to a skipped step.

    loss → gradient → unscale → reduce → finite → optimizer or skip

- `gradients` differentiates the loss under its policy and its `loss_scale`, and unscales;
- `accumulation` does so for each microbatch, and `reduction` averages over replicas (`cross_device` knows what differs
  between devices, `overwritten` which leaves are the state of fp8 layers and have no gradients);
- `finite` decides whether what came out is finite;
- `optimizer` applies it, or nothing; `train_state` holds what changes, and `train_step` joins all of these.

`state_sharding` says on which devices a state is placed, `manifest` what a checkpoint says of itself.
"""
