"""Arithmetic with a calculator: the policy learns to call the tool, and to give its result as the answer."""

import ast
import operator
import random
import re
from typing import Any

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Calculator:
    @classmethod
    def rows(cls, count: int = 256, seed: int = 0) -> list[dict[str, Any]]:
        """Problems with two operations; the same ones for a seed."""
        draw = random.Random(seed)
        rows = []
        for _ in range(count):
            a, b, c = (draw.randint(2, 99) for _ in range(3))
            problem = f"{a} {draw.choice('+-*')} {b} {draw.choice('+-')} {c}"
            question = f"What is {problem}? Use the calculator, and end with the number."
            rows.append({"prompt": [{"role": "user", "content": question}], "answer": evaluate(problem)})
        return rows

    def reset(self, answer: int, **record: Any) -> None:
        self.answer = answer
        self.result: int | None = None

    def calculate(self, expression: str) -> str:
        """Calculate whole numbers.

        Args:
            expression: with + - * and parentheses, such as (12 + 3) * 4
        """
        self.result = evaluate(expression)
        return str(self.result)

    def get_reward(self) -> float:
        """1 for a call that gave the answer, whatever is written behind it."""
        return float(self.result == self.answer)


def evaluate(expression: str) -> int:
    """The value of an expression. Raises ValueError for anything but + - * of whole numbers; nothing is executed."""
    if len(expression) > 100 or re.search(r"[^\d+\-*() ]", expression):
        raise ValueError("write whole numbers with + - * and parentheses")

    def value(node: ast.AST) -> int:
        match node:
            case ast.BinOp(left, op, right) if type(op) in OPERATIONS:
                return int(OPERATIONS[type(op)](value(left), value(right)))
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.Constant(int(number)):
                return number
        raise ValueError("write whole numbers with + - * and parentheses")

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is no expression") from None
