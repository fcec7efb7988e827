"""Train a GPT on text, on one rank or many.

    mpirun -n 2 python examples/train_gpt.py                      Shakespeare, a character at a time
    mpirun -n 2 python examples/train_gpt.py --resume runs/...    go on where a run stopped
    python examples/train_gpt.py --data FOLDER                    your text, from `numstack data prepare`

Every rank holds the whole model and takes its slice of each batch; gradients are averaged over the ranks while the
backward pass still runs. A run writes metrics.jsonl, loss.png and checkpoints to its folder. Ctrl-C saves first.
"""

from numstack.comm import GradientBuckets, World, abort_on_error, create
from numstack.data import Sampler, open_dataset, shakespeare
from numstack.nn import GPT, GPTConfig
from numstack.optim import AdamW, schedules
from numstack.train import Run, parse, train_step


def main() -> None:
    world = World.from_mpi()
    abort_on_error(world)
    arguments = parse(__doc__, rank=world.rank)
    options = arguments.options

    # Data: token files on disk, and which of their windows make up this rank's part of each batch.
    dataset = open_dataset(options.data) if options.data else shakespeare(options.tokenizer)
    sampler = Sampler(
        dataset.train,
        batch=options.batch,
        context=options.context,
        seed=options.seed,
        rank=world.rank,
        n_ranks=world.size,
        n_micro_batches=options.accumulate,
    )

    # Model: the same seed gives every rank the same weights. They are float32; what is computed from them may not be.
    model = GPT(
        GPTConfig(
            n_layer=options.layers,
            n_head=options.heads,
            n_embd=options.width,
            block_size=options.context,
            vocab_size=dataset.tokenizer.vocabulary_size,
            dropout=options.dropout,
        ),
        seed=options.seed,
        precision=options.precision,
    )

    # Optimizer, and how its learning rate changes from step to step.
    optimizer = AdamW(
        model.parameters,
        betas=(options.beta1, options.beta2),
        weight_decay=options.weight_decay,
        loss_scaling=model.precision.loss_scaling,
    )
    learning_rate = schedules.create(
        options.schedule,
        peak=options.learning_rate,
        final=options.final_learning_rate,
        n_steps=options.steps,
        n_warmup=min(options.warmup, options.steps),
        n_decay=min(options.decay, max(0, options.steps - options.warmup)),
    )

    # Ranks: buckets of gradients are averaged as soon as the backward pass has made them final.
    buckets = GradientBuckets(model.parameters.gradients, model.parameters.ranges, create(world, options.communicator))

    with Run(arguments, world=world, model=model, optimizer=optimizer, dataset=dataset) as run:
        for step in run.steps():
            model.set_dropout_step(step, rank=world.rank)
            loss = train_step(
                model,
                optimizer,
                sampler.micro_batches(step),
                learning_rate=learning_rate(step),
                max_norm=options.clip or None,
                buckets=buckets,
            )
            run.record(loss)


if __name__ == "__main__":
    main()
