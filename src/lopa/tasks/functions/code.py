"""Write the code of a specified function in one of many equivalent ways.

Choices made once for the whole answer: the shape (loop, comprehension, stepwise, filter and map,
while), variable names, quotes, type hints. Every combination must be correct; the tests run them.
"""

from lopa.tasks.functions.spec import FunctionSpec
from lopa.tasks.rng import Rng

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

    def __init__(self, spec: FunctionSpec, rng: Rng) -> None:
        self.spec = spec
        self.rng = rng
        self.imports: list[str] = []
        taken = {spec.argument, spec.name}
        self.x = self._name(spec.source.variables, taken)
        self.acc = self._name(
            _LISTS if spec.reduction.name not in ("sum", "product", "count") else _TOTALS, taken
        )
        if spec.reduction.name in ("largest", "smallest", "last"):
            self.acc = self._name(_BESTS, taken)
        self.kept = self._name(_KEPT, taken)
        self.mapped = self._name(_MAPPED, taken)
        self.value = self._name(_VALUES, taken)
        self.index = self._name(_INDICES, taken)
        self.answer = self._name(_ANSWERS, taken)
        self.has_hints = rng.chance(0.3)
        self.double_quotes = rng.chance(0.4)
        self.adds_in_place = rng.chance(0.7)
        self.names_value = rng.chance(0.4)
        self.elements = rng.skewed(spec.source.elements).format(a=spec.argument)
        if self.x == "c":
            self.elements = self.elements.replace("int(c) for c in", "int(s) for s in")

    def text(self, shape: str | None = None) -> str:
        """The code without a final line break; `shape` fixes the overall shape."""
        rng = self.rng
        shape = shape or rng.skewed(SHAPES)
        if shape == "while" and self.spec.source.name not in ("list", "range", "chars", "words"):
            shape = "loop"
        if shape == "comprehension":
            body = self._comprehension()
        elif shape in ("stepwise", "lambda"):
            body = self._stepwise(shape == "lambda")
        else:
            body = self._loop(shape)
        if rng.chance(0.35):
            body = self._with_named_answer(body)
        head = self._head()
        code = "\n".join([*self.imports, *([""] if self.imports else []), *head, *body])
        return code.replace("'", '"') if self.double_quotes else code

    def _name(self, options: tuple[str, ...], taken: set[str]) -> str:
        name = self.rng.skewed(options)
        while name in taken:
            name = self.rng.pick(options)
        taken.add(name)
        return name

    def _head(self) -> list[str]:
        spec, rng = self.spec, self.rng
        if self.has_hints:
            returned = f" -> {spec.return_hint}" if spec.return_hint else ""
            head = [f"def {spec.name}({spec.argument}: {spec.source.type_hint}){returned}:"]
        else:
            head = [f"def {spec.name}({spec.argument}):"]
        if rng.chance(0.35):
            verb = rng.skewed(("Return", "Compute", "Get", "Find"))
            what = rng.skewed((spec.reduction.words[0].replace("_", " "), "result", "answer"))
            of = rng.skewed((f" of {spec.argument}", "", f" for the given {spec.argument}"))
            head.append(f'    """{verb} the {what}{of}."""')
        return head

    def _with_named_answer(self, body: list[str]) -> list[str]:
        """Give the returned expression a name first, unless it is a plain name already."""
        start, word, expression = body[-1].partition("    return ")
        if start or not word or expression.isidentifier():
            return body
        lines = [*body[:-1], f"    {self.answer} = {expression}", f"    return {self.answer}"]
        if self.rng.chance(0.25):
            comment = self.rng.skewed(("put it together", "final step", "this is the result"))
            lines.insert(-2, f"    # {comment}")
        return lines

    def _condition(self, x: str, negated: bool = False) -> str:
        predicate = self.spec.predicate
        codes = predicate.negations if negated else predicate.codes
        return self.rng.skewed(codes).format(x=x, k=self.spec.predicate_literal)

    def _changed(self, x: str) -> str:
        if not self.spec.map.codes:
            return x
        return self.rng.skewed(self.spec.map.codes).format(x=x, k=self.spec.map_literal)

    def _text_value(self, value: str) -> str:
        return value if self.spec.value_type == "str" else f"str({value})"

    # Loops

    def _loop(self, shape: str) -> list[str]:
        spec, rng, x = self.spec, self.rng, self.x
        reduction = spec.reduction.name
        lines = [f"    {line}" for line in self._initial()]
        if shape != "while" and rng.chance(0.35):
            lines.append(f"    # {rng.skewed(_COMMENTS)} {rng.skewed(('each', 'every'))} {x}")
        indent = "        "
        after: list[str] = []
        if shape == "while":
            if spec.source.name == "range":
                lines += [f"    {x} = 1", f"    while {x} <= {spec.argument}:"]
                step = f"{indent}{self._add(x, '1')}"
            else:
                i, items = self.index, spec.argument
                lines += [f"    {i} = 0", f"    while {i} < len({items}):"]
                lines.append(f"{indent}{x} = {items}[{i}]")
                step = f"{indent}{self._add(i, '1')}"
            after = [step]
        elif spec.source.elements == ("{a}",) and rng.chance(0.2):
            i, items = self.index, spec.argument
            if rng.chance(0.5):
                lines.append(f"    for {i} in range(len({items})):")
                lines.append(f"{indent}{x} = {items}[{i}]")
            else:
                lines.append(f"    for {i}, {x} in enumerate({items}):")
        else:
            lines.append(f"    for {x} in {self.elements}:")
        if spec.predicate.codes:
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
        reduction, acc = self.spec.reduction.name, self.acc
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
        return [f"{acc} = {self.rng.skewed(('[]', '[]', 'list()'))}"]

    def _update(self, reduction: str) -> list[str]:
        rng, acc, spec = self.rng, self.acc, self.spec
        value = self._changed(self.x)
        lines: list[str] = []
        if reduction == "count":
            return [self._add(acc, "1")]
        if reduction == "any":
            return ["return True"]
        compares = reduction in ("largest", "smallest")
        if spec.map.codes and (compares or self.names_value):
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
            test = rng.skewed((f"{value} {sign} {acc}", f"not {acc} {sign}= {value}"))
            return [*lines, f"if {acc} is None or {test}:", f"    {acc} = {value}"]
        if reduction in ("unique", "countunique"):
            return [*lines, f"{acc}.add({value})"]
        if reduction == "text":
            value = self._text_value(value)
        return [*lines, rng.skewed((f"{acc}.append({value})", f"{acc} += [{value}]"))]

    def _end(self) -> list[str]:
        rng, acc = self.rng, self.acc
        reduction = self.spec.reduction.name
        if reduction == "first":
            return ["return None"]
        if reduction == "any":
            return ["return False"]
        if reduction in ("largest", "smallest"):
            return rng.skewed(
                (
                    [f"return 0 if {acc} is None else {acc}"],
                    [f"if {acc} is None:", "    return 0", f"return {acc}"],
                    [f"return {acc} if {acc} is not None else 0"],
                )
            )
        if reduction in ("ascending", "unique"):
            if reduction == "ascending" and rng.chance(0.4):
                return [f"{acc}.sort()", f"return {acc}"]
            return [f"return sorted({acc})"]
        if reduction == "descending":
            return rng.skewed(
                (
                    [f"return sorted({acc}, reverse=True)"],
                    [f"{acc}.sort(reverse=True)", f"return {acc}"],
                    [f"return sorted({acc})[::-1]"],
                )
            )
        if reduction == "reverse":
            return rng.skewed(
                (
                    [f"return {acc}[::-1]"],
                    [f"{acc}.reverse()", f"return {acc}"],
                    [f"return list(reversed({acc}))"],
                )
            )
        if reduction == "countunique":
            return [f"return len({acc})"]
        if reduction == "text":
            return [f"return {self.spec.reduction_literal}.join({acc})"]
        return [f"return {acc}"]

    # Expressions

    def _comprehension(self) -> list[str]:
        rng, spec, x = self.rng, self.spec, self.x
        reduction = spec.reduction.name
        condition = f" if {self._condition(x)}" if spec.predicate.codes else ""
        value = self._changed(x)
        if reduction == "text":
            value = self._text_value(value)
        loop = f"for {x} in {self.elements}{condition}"
        inner = f"{value} {loop}"
        if reduction == "any":
            if not condition:
                return self._finish(f"[{inner}]")
            return [f"    return any({condition[4:]} for {x} in {self.elements})"]
        if reduction == "count" and rng.chance(0.6):
            return [f"    return sum(1 {loop})"]
        if reduction == "first" and rng.chance(0.7):
            return [f"    return next(({inner}), None)"]
        if reduction in ("largest", "smallest") and rng.chance(0.7):
            function = "max" if reduction == "largest" else "min"
            inside = rng.skewed((f"({inner})", f"[{inner}]"))
            return [f"    return {function}({inside}, default=0)"]
        if reduction in ("sum", "ascending") and rng.chance(0.8):
            function = "sum" if reduction == "sum" else "sorted"
            return [f"    return {function}({inner})"]
        if reduction in ("unique", "countunique") and rng.chance(0.8):
            function = "sorted" if reduction == "unique" else "len"
            return [f"    return {function}({rng.skewed(('{' + inner + '}', f'set({inner})'))})"]
        if reduction == "text" and rng.chance(0.8):
            return [f"    return {spec.reduction_literal}.join({inner})"]
        if reduction == "list":
            return [f"    return {rng.skewed((f'[{inner}]', f'list({inner})'))}"]
        return self._finish(f"[{inner}]", is_text=reduction == "text")

    def _stepwise(self, uses_lambda: bool) -> list[str]:
        spec, x = self.spec, self.x
        lines = []
        current = self.elements
        if spec.predicate.codes:
            condition = self._condition(x)
            kept = f"[{x} for {x} in {current} if {condition}]"
            if uses_lambda:
                kept = f"list(filter(lambda {x}: {condition}, {current}))"
            lines.append(f"    {self.kept} = {kept}")
            current = self.kept
        if spec.map.codes:
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
        rng = self.rng
        reduction = self.spec.reduction.name
        if reduction == "product":
            if rng.chance(0.4):
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
            if self.spec.value_type != "str" and not is_text:
                joined = rng.skewed(
                    (f"map(str, {values})", f"[str({self.x}) for {self.x} in {values}]")
                )
            return [f"    return {self.spec.reduction_literal}.join({joined})"]
        if reduction in ("first", "last"):
            place = "0" if reduction == "first" else "-1"
            if rng.chance(0.4):
                return [
                    f"    if not {values}:",
                    "        return None",
                    f"    return {values}[{place}]",
                ]
            return [f"    return {values}[{place}] if {values} else None"]
        if reduction in ("largest", "smallest"):
            function = "max" if reduction == "largest" else "min"
            return rng.skewed(
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
        return [f"    return {rng.skewed(_RETURNS[reduction]).format(v=values)}"]


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
