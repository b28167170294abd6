"""A few short prompts that every language model goes on with, to measure with where no others are given."""

SAMPLE_PROMPTS = (
    "def fibonacci(n):\n    ",
    "import json\nimport sys\n\n\ndef main():\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def read_lines(path):\n    with open(path) as file:\n        ",
    "for i in range(10):\n    if i % 2 == 0:\n        ",
    "try:\n    value = int(text)\nexcept ValueError:\n    ",
)
