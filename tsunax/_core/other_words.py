"""Names of other libraries for arguments and functions of tsunax, for the hints of errors.

It is imported when there is an error. `docs/coming-from.md` compares whole calls.
"""

from collections.abc import Sequence

# Our word, and the words of Flux, Keras, Lightning, PyTorch, transformers and more for the same
# thing. A word may occur in several lines: the hint is the word that the call accepts.
_WORDS = {
    # rules and schedules
    "learning_rate": "lr eta alpha rate step_size stepsize",
    "b1": "beta betas beta1 beta_1 momentum",
    "b2": "beta2 beta_2",
    "momentum": "rho beta b1 mu",
    "decay": "rho alpha",
    "eps": "epsilon",
    "weight_decay": "wd decay l2 lambda",
    "max_norm": "gradient_clip_val max_grad_norm clipnorm",
    "init_value": "lr base_lr initial_lr initial_learning_rate start start_lr",
    "peak_value": "lr max_lr peak_lr peak",
    "end_value": "final final_lr eta_min min_lr lr_end end",
    "decay_steps": "T_max total_steps num_training_steps steps period",
    "warmup_steps": "num_warmup_steps warmup",
    "decay_rate": "gamma",
    "transition_steps": "step_size steps",
    # setup and the step
    "key": "rng rngs seed prng random_state",
    "trainable": "wrt requires_grad train_only",
    "ema": "ema_decay",
    "bfloat16": "bf16 bf16-mixed bf16-true mixed_bfloat16",
    "float16": "fp16 16 16-mixed 16-true mixed_float16 half",
    "float32": "fp32 32 32-true float single",
    "float64": "fp64 64 64-true double",
    "accumulate": "accumulate_grad_batches gradient_accumulation_steps every",
    "remat": "checkpoint gradient_checkpointing",
    # data
    "batch_size": "batchsize bs train_batch_size per_device_train_batch_size",
    "drop_remainder": "drop_last partial",
    "size": "buffer_size prefetch_factor n",
    # fit
    "steps": "max_steps num_steps n_steps iterations num_iterations",
    "epochs": "max_epochs num_epochs n_epochs nb_epoch num_train_epochs",
    "evaluate": "validation_data val_data val_dataloaders eval_data eval_dataset validation",
    "evaluate_every": "val_check_interval check_val_every_n_epoch eval_steps validation_freq",
    "callbacks": "callback cb hooks",
    "logger": "loggers report_to",
    "log_every": "every log_every_n_steps logging_steps log_interval",
    "checkpoint": "ckpt_path resume_from_checkpoint default_root_dir output_dir checkpoint_dir "
    "save_dir save_every",
    "progress": "verbose enable_progress_bar disable_tqdm progbar",
    "dry_run": "fast_dev_run",
    "keep_last": "max_to_keep save_total_limit keep",
    "keep_best": "save_top_k monitor best_fn",
    # searches
    "trials": "n_trials num_samples num_trials",
    "mode": "direction goal",
    "memory": "mem max_memory budget",
    "low": "min_lr start_lr",
    "high": "max_lr end_lr",
    "points": "num_training num_it num_iter steps",
    "stop": "early_stop_threshold diverge_th",
    # losses, metrics, callbacks, loggers, data
    "squared_error": "mse mse_loss MSELoss mean_squared_error MeanSquaredError",
    "absolute_error": "mae l1 l1_loss L1Loss mean_absolute_error MeanAbsoluteError",
    "binary_cross_entropy": "bce binary_crossentropy BCELoss BinaryCrossentropy",
    "sigmoid_binary_cross_entropy": "bce_with_logits BCEWithLogitsLoss logitbinarycrossentropy",
    "cross_entropy": "ce crossentropy nll_loss categorical_crossentropy",
    "softmax_cross_entropy": "logitcrossentropy",
    "softmax_cross_entropy_with_integer_labels": "CrossEntropyLoss sparse_categorical_crossentropy",
    "huber_loss": "huber smooth_l1 smooth_l1_loss SmoothL1Loss HuberLoss",
    "ntxent": "info_nce InfoNCE infonce nt_xent NTXentLoss contrastive_loss",
    "kl_divergence": "kl kl_div kldivergence KLDivLoss",
    "Accuracy": "acc accuracy",
    "ConfusionMatrix": "confusion_matrix confmat",
    "F1": "F1Score f1_score",
    "metric": "monitor quantity",
    "early_stopping": "EarlyStopping early_stop",
    "plateau": "ReduceLROnPlateau reduce_lr_on_plateau",
    "tensorboard": "TensorBoardLogger SummaryWriter",
    "csv": "CSVLogger csv_logger",
    "batches": "DataLoader Dataset TensorDataset",
    # masks, data, devices
    "mask": "weights weight where sample_weight",
    "where": "weights weight mask sample_weight",
    "data": "dp",
    "gpu": "AMDGPU nvidia",
    "tensor": "tp mp model",
    "warmup_cosine_decay_schedule": "warmup_cosine cosine_with_warmup CosineWarmup",
    "cosine_decay_schedule": "cosine cosine_annealing CosineAnnealingLR",
    "cosine_onecycle_schedule": "OneCycleLR OneCycle one_cycle onecycle",
    "piecewise_constant_schedule": "StepLR MultiStepLR",
    "exponential_decay": "ExponentialLR ExponentialDecay",
    "clip_by_global_norm": "clip_grad_norm clip_grad_norm_ clipnorm",
}


# What to write here for words of other libraries that have no counterpart in the same call.
_ELSEWHERE = {
    "max_grad_norm grad_clip gradient_clip gradient_clip_val clipnorm": "The rule clips: "
    "ts.rules.chain(ts.rules.clip_by_global_norm(1.0), rule).",
    "steps_per_epoch limit_train_batches": "An epoch is one pass over the data: give steps=.",
    "lr learning_rate": "The rule has it: ts.rules.adam(1e-3), then ts.adjust(state, "
    "learning_rate=1e-4).",
    "optimizer opt tx Optimizer": "The state has the rule: ts.setup(rule, params).",
    "batch_size bs shuffle num_workers": "Make batches: ts.batches(arrays, 32, shuffle=True).",
    "validation_split": "Cut the arrays yourself, and give evaluate=.",
    "seed rng random_state": "Give a seed to ts.setup(..., key=0) and ts.batches(..., seed=0).",
    "device gpus accelerator": 'The state says where: ts.setup(..., device="gpu").',
    "amp fp16 mixed_precision": 'Give ts.setup(..., precision="bfloat16").',
    "accumulate accumulate_grad_batches gradient_accumulation_steps": "Give ts.train_step(loss_fn, "
    "accumulate=4).",
    "patience min_delta early_stopping": 'Give callbacks=ts.callbacks.early_stopping("val/loss", '
    "patience=5).",
    "criterion loss loss_fn": "The step has it: ts.train_step(loss_fn).",
    "metrics": "loss_fn returns them: ts.Loss.mean(values, metrics={...}).",
    "strict": "To restore a part of the params, give partial= with a pattern.",
    "wandb WandbLogger": "A logger is a function f(row, step=...): logger=wandb.log.",
    "mlflow MLFlowLogger": "A logger is a function f(row, step=...): logger=mlflow.log_metrics.",
    "ModelCheckpoint CheckpointManager": "Give ts.fit(..., checkpoint=path), or ts.Checkpoints.",
    "save save_checkpoint": "Write ts.Checkpoints(path).save(state), or ts.exchange.save.",
    "load load_checkpoint restore": "Write ts.Checkpoints(path).restore(state), or "
    "ts.exchange.restore.",
    "TerminateOnNaN": "Steps with NaN are rejected; ts.fit(..., max_bad=10) ends after so many.",
    "MeanAbsoluteError mae mean_absolute_error": "Give ts.metrics.Mean.of("
    "ts.losses.absolute_error(predictions, targets)).",
    "Trainer train": "Write state, history = ts.fit(step, state, data, epochs=10).",
    "create": "Write state = ts.setup(rule, params).",
    "apply_gradients": "Write state, info = ts.update(state, grads).",
    "apply_fn": "The loss function calls the model: loss_fn(params, batch).",
}


def synonyms(name: str, known_names: Sequence[str]) -> list[str]:
    """The known names with the meaning that this word has in other libraries."""
    return [
        word
        for word, foreign_words in _WORDS.items()
        if name in foreign_words.split() and word in known_names
    ]


def elsewhere(name: str) -> str:
    """The hint for a word that means another call of tsunax; "" for other words."""
    return next((text for words, text in _ELSEWHERE.items() if name in words.split()), "")
