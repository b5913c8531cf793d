# %% [markdown]
# # Your own reward, your own tools
# At the end you have a model that was trained on a reward you wrote, and one that was trained to use a tool.
#
# A reward is a function in a file, and a tool environment is a class. A configuration names either.
# The models here are too small to write text worth reading: look at the rewards. This takes a minute and a half on two CPU cores.
#
# For a real model, change the names and lower the learning rate. Leave out the cell that teaches the call: such a model can already call tools.

# %% tags=["parameters"]
import json
from pathlib import Path

try: import cogumi
except ModuleNotFoundError: raise SystemExit("Choose the kernel cogumi (Kernel, Change Kernel). If it is not listed, run in the clone: sh requirements/install.sh")
from cogumi.notebook import figures

CONFIG, BASE = "smoke/gspo", "cogumi:small-base"  # the real ones: "qwen2.5-coder-7b-gspo-fim", "Qwen/Qwen2.5-Coder-7B"
RUNS, REWARD_STEPS, CALL_STEPS, TOOL_STEPS = "runs/own", 16, 120, 32
CALLER = "runs/own/calls/merged"  # who uses the tool, taught below; a real one: "Qwen/Qwen3-4B-Instruct-2507"

# %% [markdown]
# **A reward** gets the completions, and every column of the data by its name. It returns a number for each completion. This one pays 1
# for a completion that is as long as the answer, and less for others. Try it by hand first.

# %%
Path("my_rewards.py").write_text('''
def right_length(completions, middle, **columns):
    return [max(0.0, 1 - abs(len(c) - len(m)) / len(m)) for c, m in zip(completions, middle)]''')
from my_rewards import right_length

print(right_length(["f(x)", "f(", "f(x) + f(y)"], middle=["g(x)", "g(x)", "g(x)"]))

# %% [markdown]
# The config names it as `file.py:function`.

# %%
mine = {"cogumi__rewards": ["my_rewards.py:right_length"], "train__max_steps": REWARD_STEPS}
print(cogumi.start(CONFIG, model__name=BASE, cogumi__run_dir=f"{RUNS}/reward", **mine).wait().state)

# %%
figures.rewards(f"{RUNS}/reward")

# %% [markdown]
# **Read what earns it**, not the curve alone. This reward pays for the length, so the text may be nonsense. Here is the newest rollout, from the worst to the best:

# %%
newest = json.loads(Path(RUNS, "reward", "rollouts.jsonl").read_text().splitlines()[-1])
print(*((each["reward"], each["completion"]) for each in newest["shown"]), sep="\n")

# %% [markdown]
# **A tool environment.** `rows` is its data. `reset` gets a row of it. Every other public method is a tool; the model is shown its
# types and docstring. `get_reward` pays. Here one of five boxes holds a prize. The prize is worth half if it was found in the second box that was opened.

# %%
Path("boxes.py").write_text('''
class Boxes:
    rows = [{"prompt": [{"role": "user", "content": "Find the prize."}], "prize": 4}] * 16

    def reset(self, prize, **row):
        self.prize, self.opened = prize, []

    def open(self, box: int) -> str:
        """Open a box.\n\nArgs:\n    box: from 1 to 5"""
        self.opened.append(box)
        return "prize" if box == self.prize else "empty"

    def get_reward(self):
        return 1 / len(self.opened) if self.prize in self.opened else 0.0''')

# %% [markdown]
# **Teach the call first**, because this base has random weights. The conversations open one box or two, each box equally often.
# The chat format is the shortest of those whose calls TRL can read.

# %%
cogumi.patch()
import trl
from boxes import Boxes
from transformers.utils import get_json_schema

call = lambda box: {"role": "assistant", "tool_calls": [{"name": "open", "arguments": {"box": box}}]}
said = lambda text, role="tool": {"role": role, "content": text}
games = [[call(a), said("empty"), call(b), said("prize")][start:] for a in range(1, 6) for b in range(1, 6) for start in (0, 2)]
talk = lambda game: {"messages": [*Boxes.rows[0]["prompt"], *game, said("done", "assistant")], "tools": [get_json_schema(Boxes().open)]}
Path("calls.jsonl").write_text("\n".join(json.dumps(talk(game)) for game in games))
template = str(Path(trl.__file__).with_name("chat_templates") / "lfm2_v2.jinja")
train = {"max_steps": CALL_STEPS, "learning_rate": 1e-2, "save_strategy": "no", "chat_template_path": template}
data, own = {"source": "calls.jsonl", "format": "chat"}, {"method": "sft", "tuning": "full", "run_dir": f"{RUNS}/calls"}
print(cogumi.start({"model": {"name": "cogumi:random-qwen3"}, "data": data, "train": train, "cogumi": own}).wait().state)

# %% [markdown]
# **Train with the tool.** The config names the class, and its data and reward come with it.

# %%
Path("boxes.yaml").write_text(f'''
model: {{name: {CALLER}}}
train:
  max_steps: {TOOL_STEPS}
  num_generations: 8               # episodes of one prompt
  per_device_train_batch_size: 16
  steps_per_generation: 2
  max_completion_length: 176       # tokens of an episode, with what the tool says
  max_tool_calling_iterations: 2   # boxes that may be opened
  learning_rate: 3e-4
  lr_scheduler_type: constant
cogumi: {{method: gspo, tuning: full, environment: boxes.py:Boxes, run_dir: {RUNS}/tools}}''')
print(cogumi.start("boxes.yaml").wait().state)

# %%
figures.rewards(f"{RUNS}/tools")

# %% [markdown]
# **Read an episode.** This is one of the best of the newest rollout.

# %%
print(json.loads(Path(RUNS, "tools", "rollouts.jsonl").read_text().splitlines()[-1])["shown"][-1]["completion"])

# %% [markdown]
# **Is the tool's text left out of the loss?** `masked_share` is its share of the tokens. The loss and its gradient were compared
# with the formula at every token. At the tool's tokens the gradient has to be 0.

# %%
rollout = [row for row in map(json.loads, Path(RUNS, "tools", "metrics.jsonl").open()) if "reward" in row][-1]
print({name: round(rollout[name], 2) for name in ("tools/call_frequency", "episodes/masked_share", "episodes/without_end", "reward")},
    json.loads(Path(RUNS, "tools", "loss.json").read_text())["relative_difference"])

# %% [markdown]
# **Next**: use your reward in a config of your own, `cogumi.rewards: [my_rewards.py:right_length]`, and train as in the [quickstart](00_quickstart.ipynb).
