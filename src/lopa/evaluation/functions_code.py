"""Write the code of a planned function in one of many equivalent ways.

Choices made once for the whole answer: the shape (loop, comprehension, stepwise, filter and map,
while), variable names, quotes, type hints. Every combination must be correct; the tests run them.
"""

from lopa.evaluation.draw import Draw
from lopa.evaluation.functions_plan import Plan

SHAPES = ("loop", "comprehension", "stepwise", "skip", "while", "lambda")
_TOTALS = ("total", "result", "acc", "res", "out")
_LISTS = ("result", "out", "res", "found", "collected")
_BESTS = ("best", "result", "current", "top")
_KEPT = ("kept", "selected", "chosen", "filtered", "picked")
_MAPPED = ("changed", "mapped", "results", "new", "final")
_VALUES = ("y", "item", "new_value", "cur", "t")
_INDICES = ("index", "pos", "j", "idx")
_ANSWERS = ("answer", "ans", "output", "solution")
_COMMENTS = ("go through", "check", "look at", "loop over")


class Code:
    """Writes one answer."""

    def __init__(self, plan: Plan, draw: Draw) -> None:
        self.plan = plan
        self.draw = draw
        self.imports: list[str] = []
        taken = {plan.argument, plan.name}
        self.x = self._name(plan.source.variables, taken)
        self.acc = self._name(
            _LISTS if plan.reduction.name not in ("sum", "product", "count") else _TOTALS, taken
        )
        if plan.reduction.name in ("largest", "smallest", "last"):
            self.acc = self._name(_BESTS, taken)
        self.kept = self._name(_KEPT, taken)
        self.mapped = self._name(_MAPPED, taken)
        self.value = self._name(_VALUES, taken)
        self.index = self._name(_INDICES, taken)
        self.answer = self._name(_ANSWERS, taken)
        self.has_hints = draw.chance(0.3)
        self.double_quotes = draw.chance(0.4)
        self.adds_in_place = draw.chance(0.7)
        self.names_value = draw.chance(0.4)
        self.elements = draw.skewed(plan.source.elements).format(a=plan.argument)
        if self.x == "c":
            self.elements = self.elements.replace("int(c) for c in", "int(s) for s in")

    def text(self, shape: str | None = None) -> str:
        """The code without a final line break; `shape` fixes the overall shape."""
        draw = self.draw
        shape = shape or draw.skewed(SHAPES)
        if shape == "while" and self.plan.source.name not in ("list", "range", "chars", "words"):
            shape = "loop"
        if shape == "comprehension":
            body = self._comprehension()
        elif shape in ("stepwise", "lambda"):
            body = self._stepwise(shape == "lambda")
        else:
            body = self._loop(shape)
        if draw.chance(0.35):
            body = self._with_named_answer(body)
        head = self._head()
        code = "\n".join([*self.imports, *([""] if self.imports else []), *head, *body])
        return code.replace("'", '"') if self.double_quotes else code

    def _name(self, options: tuple[str, ...], taken: set[str]) -> str:
        name = self.draw.skewed(options)
        while name in taken:
            name = self.draw.pick(options)
        taken.add(name)
        return name

    def _head(self) -> list[str]:
        plan, draw = self.plan, self.draw
        if self.has_hints:
            returned = f" -> {plan.return_hint}" if plan.return_hint else ""
            head = [f"def {plan.name}({plan.argument}: {plan.source.type_hint}){returned}:"]
        else:
            head = [f"def {plan.name}({plan.argument}):"]
        if draw.chance(0.35):
            verb = draw.skewed(("Return", "Compute", "Get", "Find"))
            what = draw.skewed((plan.reduction.words[0].replace("_", " "), "result", "answer"))
            of = draw.skewed((f" of {plan.argument}", "", f" for the given {plan.argument}"))
            head.append(f'    """{verb} the {what}{of}."""')
        return head

    def _with_named_answer(self, body: list[str]) -> list[str]:
        """Give the returned expression a name first, unless it is a plain name already."""
        start, word, expression = body[-1].partition("    return ")
        if start or not word or expression.isidentifier():
            return body
        lines = [*body[:-1], f"    {self.answer} = {expression}", f"    return {self.answer}"]
        if self.draw.chance(0.25):
            comment = self.draw.skewed(("put it together", "final step", "this is the result"))
            lines.insert(-2, f"    # {comment}")
        return lines

    def _condition(self, x: str, negated: bool = False) -> str:
        predicate = self.plan.predicate
        codes = predicate.negations if negated else predicate.codes
        return self.draw.skewed(codes).format(x=x, k=self.plan.predicate_literal)

    def _changed(self, x: str) -> str:
        if not self.plan.map.codes:
            return x
        return self.draw.skewed(self.plan.map.codes).format(x=x, k=self.plan.map_literal)

    def _text_value(self, value: str) -> str:
        return value if self.plan.value_type == "str" else f"str({value})"

    # Loops

    def _loop(self, shape: str) -> list[str]:
        plan, draw, x = self.plan, self.draw, self.x
        reduction = plan.reduction.name
        lines = [f"    {line}" for line in self._initial()]
        if shape != "while" and draw.chance(0.35):
            lines.append(f"    # {draw.skewed(_COMMENTS)} {draw.skewed(('each', 'every'))} {x}")
        indent = "        "
        after: list[str] = []
        if shape == "while":
            if plan.source.name == "range":
                lines += [f"    {x} = 1", f"    while {x} <= {plan.argument}:"]
                step = f"{indent}{self._add(x, '1')}"
            else:
                i, items = self.index, plan.argument
                lines += [f"    {i} = 0", f"    while {i} < len({items}):"]
                lines.append(f"{indent}{x} = {items}[{i}]")
                step = f"{indent}{self._add(i, '1')}"
            after = [step]
        elif plan.source.elements == ("{a}",) and draw.chance(0.2):
            i, items = self.index, plan.argument
            if draw.chance(0.5):
                lines.append(f"    for {i} in range(len({items})):")
                lines.append(f"{indent}{x} = {items}[{i}]")
            else:
                lines.append(f"    for {i}, {x} in enumerate({items}):")
        else:
            lines.append(f"    for {x} in {self.elements}:")
        if plan.predicate.codes:
            if shape == "skip":
                lines += [
                    f"{indent}if {self._condition(x, negated=True)}:",
                    f"{indent}    continue",
                ]
            else:
                lines.append(f"{indent}if {self._condition(x)}:")
                indent += "    "
        lines += [indent + line for line in self._update(reduction)]
        lines += after
        return lines + [f"    {line}" for line in self._end()]

    def _add(self, target: str, amount: str) -> str:
        if self.adds_in_place:
            return f"{target} += {amount}"
        return f"{target} = {target} + {amount}"

    def _initial(self) -> list[str]:
        reduction, acc = self.plan.reduction.name, self.acc
        if reduction in ("first", "any"):
            return []
        if reduction in ("sum", "count"):
            return [f"{acc} = 0"]
        if reduction == "product":
            return [f"{acc} = 1"]
        if reduction in ("largest", "smallest", "last"):
            return [f"{acc} = None"]
        if reduction in ("unique", "countunique"):
            return [f"{acc} = set()"]
        return [f"{acc} = {self.draw.skewed(('[]', '[]', 'list()'))}"]

    def _update(self, reduction: str) -> list[str]:
        draw, acc, plan = self.draw, self.acc, self.plan
        value = self._changed(self.x)
        lines: list[str] = []
        if reduction == "count":
            return [self._add(acc, "1")]
        if reduction == "any":
            return ["return True"]
        compares = reduction in ("largest", "smallest")
        if plan.map.codes and (compares or self.names_value):
            lines.append(f"{self.value} = {value}")
            value = self.value
        if reduction == "first":
            return [*lines, f"return {value}"]
        if reduction == "last":
            return [*lines, f"{acc} = {value}"]
        if reduction == "sum":
            return [*lines, self._add(acc, value)]
        if reduction == "product":
            if self.adds_in_place:
                return [*lines, f"{acc} *= {value}"]
            bare = value if value in (self.x, self.value) else f"({value})"
            return [*lines, f"{acc} = {acc} * {bare}"]
        if compares:
            sign = ">" if reduction == "largest" else "<"
            test = draw.skewed((f"{value} {sign} {acc}", f"not {acc} {sign}= {value}"))
            return [*lines, f"if {acc} is None or {test}:", f"    {acc} = {value}"]
        if reduction in ("unique", "countunique"):
            return [*lines, f"{acc}.add({value})"]
        if reduction == "text":
            value = self._text_value(value)
        return [*lines, draw.skewed((f"{acc}.append({value})", f"{acc} += [{value}]"))]

    def _end(self) -> list[str]:
        draw, acc = self.draw, self.acc
        reduction = self.plan.reduction.name
        if reduction == "first":
            return ["return None"]
        if reduction == "any":
            return ["return False"]
        if reduction in ("largest", "smallest"):
            return draw.skewed(
                (
                    [f"return 0 if {acc} is None else {acc}"],
                    [f"if {acc} is None:", "    return 0", f"return {acc}"],
                    [f"return {acc} if {acc} is not None else 0"],
                )
            )
        if reduction in ("ascending", "unique"):
            if reduction == "ascending" and draw.chance(0.4):
                return [f"{acc}.sort()", f"return {acc}"]
            return [f"return sorted({acc})"]
        if reduction == "descending":
            return draw.skewed(
                (
                    [f"return sorted({acc}, reverse=True)"],
                    [f"{acc}.sort(reverse=True)", f"return {acc}"],
                    [f"return sorted({acc})[::-1]"],
                )
            )
        if reduction == "reverse":
            return draw.skewed(
                (
                    [f"return {acc}[::-1]"],
                    [f"{acc}.reverse()", f"return {acc}"],
                    [f"return list(reversed({acc}))"],
                )
            )
        if reduction == "countunique":
            return [f"return len({acc})"]
        if reduction == "text":
            return [f"return {self.plan.reduction_literal}.join({acc})"]
        return [f"return {acc}"]

    # Expressions

    def _comprehension(self) -> list[str]:
        draw, plan, x = self.draw, self.plan, self.x
        reduction = plan.reduction.name
        condition = f" if {self._condition(x)}" if plan.predicate.codes else ""
        value = self._changed(x)
        if reduction == "text":
            value = self._text_value(value)
        loop = f"for {x} in {self.elements}{condition}"
        inner = f"{value} {loop}"
        if reduction == "any":
            if not condition:
                return self._finish(f"[{inner}]")
            return [f"    return any({condition[4:]} for {x} in {self.elements})"]
        if reduction == "count" and draw.chance(0.6):
            return [f"    return sum(1 {loop})"]
        if reduction == "first" and draw.chance(0.7):
            return [f"    return next(({inner}), None)"]
        if reduction in ("largest", "smallest") and draw.chance(0.7):
            function = "max" if reduction == "largest" else "min"
            inside = draw.skewed((f"({inner})", f"[{inner}]"))
            return [f"    return {function}({inside}, default=0)"]
        if reduction in ("sum", "ascending") and draw.chance(0.8):
            function = "sum" if reduction == "sum" else "sorted"
            return [f"    return {function}({inner})"]
        if reduction in ("unique", "countunique") and draw.chance(0.8):
            function = "sorted" if reduction == "unique" else "len"
            return [f"    return {function}({draw.skewed(('{' + inner + '}', f'set({inner})'))})"]
        if reduction == "text" and draw.chance(0.8):
            return [f"    return {plan.reduction_literal}.join({inner})"]
        if reduction == "list":
            return [f"    return {draw.skewed((f'[{inner}]', f'list({inner})'))}"]
        return self._finish(f"[{inner}]", is_text=reduction == "text")

    def _stepwise(self, uses_lambda: bool) -> list[str]:
        plan, x = self.plan, self.x
        lines = []
        current = self.elements
        if plan.predicate.codes:
            condition = self._condition(x)
            kept = f"[{x} for {x} in {current} if {condition}]"
            if uses_lambda:
                kept = f"list(filter(lambda {x}: {condition}, {current}))"
            lines.append(f"    {self.kept} = {kept}")
            current = self.kept
        if plan.map.codes:
            value = self._changed(x)
            mapped = f"[{value} for {x} in {current}]"
            if uses_lambda:
                mapped = f"list(map(lambda {x}: {value}, {current}))"
            lines.append(f"    {self.mapped} = {mapped}")
            current = self.mapped
        if not lines:
            return self._finish(f"list({current})")
        return lines + self._returned(current)

    def _finish(self, values: str, is_text: bool = False) -> list[str]:
        """Name a list of values, then reduce it."""
        lines = [f"    {self.mapped} = {values}"]
        return lines + self._returned(self.mapped, is_text)

    def _returned(self, values: str, is_text: bool = False) -> list[str]:
        """Reduce the list held by a variable."""
        draw = self.draw
        reduction = self.plan.reduction.name
        if reduction == "product":
            if draw.chance(0.4):
                self.imports.append("from math import prod")
                return [f"    return prod({values})"]
            acc, value = self.acc, self.value
            return [
                f"    {acc} = 1",
                f"    for {value} in {values}:",
                f"        {acc} *= {value}"
                if self.adds_in_place
                else f"        {acc} = {acc} * {value}",
                f"    return {acc}",
            ]
        if reduction == "text":
            joined = values
            if self.plan.value_type != "str" and not is_text:
                joined = draw.skewed(
                    (f"map(str, {values})", f"[str({self.x}) for {self.x} in {values}]")
                )
            return [f"    return {self.plan.reduction_literal}.join({joined})"]
        if reduction in ("first", "last"):
            place = "0" if reduction == "first" else "-1"
            if draw.chance(0.4):
                return [
                    f"    if not {values}:",
                    "        return None",
                    f"    return {values}[{place}]",
                ]
            return [f"    return {values}[{place}] if {values} else None"]
        if reduction in ("largest", "smallest"):
            function = "max" if reduction == "largest" else "min"
            return draw.skewed(
                (
                    [f"    return {function}({values}, default=0)"],
                    [f"    return {function}({values}) if {values} else 0"],
                    [
                        f"    if not {values}:",
                        "        return 0",
                        f"    return {function}({values})",
                    ],
                )
            )
        return [f"    return {draw.skewed(_RETURNS[reduction]).format(v=values)}"]


_RETURNS: dict[str, tuple[str, ...]] = {
    "list": ("{v}",),
    "sum": ("sum({v})",),
    "count": ("len({v})", "sum(1 for _ in {v})"),
    "ascending": ("sorted({v})",),
    "descending": ("sorted({v}, reverse=True)", "sorted({v})[::-1]"),
    "reverse": ("{v}[::-1]", "list(reversed({v}))"),
    "unique": ("sorted(set({v}))", "sorted({{*{v}}})"),
    "countunique": ("len(set({v}))", "len({{*{v}}})"),
    "any": ("len({v}) > 0", "bool({v})", "{v} != []"),
}
