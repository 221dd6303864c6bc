"""flax.linen under policies.

There is nothing to call: linen modules follow a policy by themselves wherever `mpjax.autocast`,
`mpjax.value_and_grad` or a train step runs them, and `mpjax.explain(model, policies, *inputs)` shows which policy
governs which module.
"""
