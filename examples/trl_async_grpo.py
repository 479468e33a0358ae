"""An asynchronous GRPO script for TRL with one line changed, the import of the trainer. A minute or two on two cores.

python examples/trl_async_grpo.py            samples with the built-in engine
python examples/trl_async_grpo.py URL        samples on a running vLLM server
"""

import sys

from trl_grpo import puzzles, solved

from outpace.compat.trl import AsyncGRPOConfig, AsyncGRPOTrainer

if __name__ == "__main__":
    server = {"vllm_server_base_url": sys.argv[1]} if len(sys.argv) > 1 else {}
    config = AsyncGRPOConfig(
        output_dir="runs/trl-async-grpo",
        learning_rate=3e-4,
        max_completion_length=32,
        per_device_train_batch_size=256,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        max_staleness=2,
        max_steps=24,
        logging_steps=6,
        **server,
    )
    trainer = AsyncGRPOTrainer(
        model="starter",
        args=config,
        train_dataset=puzzles("train", 4096),
        reward_funcs=solved,
    )
    trainer.train()
    trainer.save_model("runs/trl-async-grpo/trained")
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    print(f"training reward {rewards[0]:.3f} -> {rewards[-1]:.3f}")
