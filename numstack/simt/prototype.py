"""First working version of the CPU compiler; replaced by the passes of this room as they land."""
# ruff: noqa
# mypy: ignore-errors
import ast, copy, inspect, itertools, textwrap
import numpy as np, numba
from numba import cuda, njit, types
from numba.core.typing import Context
from numba.np.numpy_support import as_dtype
from numstack.errors import KernelError

BAR = {"syncthreads", "syncwarp", "threadfence", "threadfence_block"}
SHF = {"shfl_down_sync", "shfl_xor_sync", "shfl_up_sync", "shfl_sync"}
VOTE = {"any_sync", "all_sync", "ballot_sync", "syncthreads_or", "syncthreads_and", "syncthreads_count"}
ATOMICS = {"add", "sub", "max", "min", "and_", "or_", "xor", "exch", "cas"}


def _mk(op):
    env = {}
    exec(f"def f(a, i, v):\n    old = a[i]\n    a[i] = {op}\n    return old", env)
    return njit(env["f"])


ATOMIC_FN = {k: _mk(v) for k, v in dict(add="old + v", sub="old - v", max="max(old, v)", min="min(old, v)", and_="old & v", or_="old | v", xor="old ^ v", exch="v").items()}


@njit
def _cas(a, i, old, v):
    was = a[i]
    if was == old:
        a[i] = v
    return was


ATOMIC_FN["cas"] = _cas


def cname(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr); node = node.value
    if isinstance(node, ast.Name) and node.id == "cuda":
        return ".".join(reversed(parts))
    return None


def get_tree(fn):
    lines, first = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    ast.increment_lineno(tree, first - 1)
    tree.decorator_list = []
    if isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Constant):
        tree.body = tree.body[1:] or [ast.Pass()]
    return tree


def globals_of(fn):
    g = dict(fn.__globals__)
    g.update(inspect.getclosurevars(fn).nonlocals)
    return g


def is_special(x):
    if isinstance(x, ast.Attribute) or isinstance(x, ast.Call):
        c = cname(x.func if isinstance(x, ast.Call) else x)
        return c is not None and c != "cuda"
    return False


class Prep(ast.NodeTransformer):
    def __init__(s, g, kernel): s.g, s.n, s.pre, s.extra, s.kernel = g, itertools.count(), [], {}, kernel
    def fail(s, node, why): raise KernelError(f"{s.kernel.__code__.co_filename}:{getattr(node, 'lineno', '?')}: {why}")
    def device(s, call):
        if isinstance(call.func, ast.Name):
            f = s.g.get(call.func.id)
            py = getattr(f, "py_func", None)
            if py is not None:
                return py
        return None
    def stmts(s, body):
        out = []
        for st in body:
            s.pre = []
            if isinstance(st, (ast.For, ast.While, ast.If)):
                if isinstance(st, ast.If) or isinstance(st, ast.For):
                    f = "test" if isinstance(st, ast.If) else "iter"
                    setattr(st, f, s.visit(getattr(st, f)))
                    out += s.pre
                st.body = s.stmts(st.body)
                st.orelse = s.stmts(st.orelse)
                out.append(st); continue
            if isinstance(st, ast.Expr) and isinstance(st.value, ast.Call) and cname(st.value.func) in BAR:
                out.append(st); continue
            s.pre = []
            st = s.visit(st)
            out += s.pre + ([st] if st is not None else [])
        return out
    def assign(s, name, value, at):
        a = ast.Assign([ast.Name(name, ast.Store())], value)
        ast.copy_location(a, at); ast.fix_missing_locations(a)
        s.pre.append(a)
    def visit_Expr(s, st):
        s.generic_visit(st)
        return None if isinstance(st.value, ast.Name) else st
    def visit_IfExp(s, node):
        n = len(s.pre)
        s.generic_visit(node)
        for p in s.pre[n:]:
            if is_shfl(p): s.fail(node, "a warp operation inside a conditional expression; use a statement")
        return node
    def visit_Call(s, node):
        s.generic_visit(node)
        c = cname(node.func)
        if c in SHF or c in VOTE:
            k = next(s.n); a, b = f"_sv{k}", f"_st{k}"
            first = 0 if c.startswith("syncthreads") else 1
            s.assign(a, node.args[first], node)
            extra = node.args[first + 1] if len(node.args) > first + 1 else ast.Constant(0)
            s.assign(b, ast.Call(ast.Name("__shfl__", ast.Load()), [ast.Constant(c), ast.Name(a, ast.Load()), extra], []), node)
            return ast.Name(b, ast.Load())
        py = s.device(node)
        if py is not None:
            t = copy.deepcopy(get_tree(py))
            if not any(is_special(x) or (isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and getattr(globals_of(py).get(x.func.id), "py_func", None)) for x in ast.walk(t)):
                name = f"_dev_{py.__name__}"
                s.extra[name] = njit(py)
                node.func = ast.Name(name, ast.Load())
                return node
            k = next(s.n); ren = {}
            g2 = globals_of(py)
            for arg, val in zip(t.args.args, node.args):
                ren[arg.arg] = f"_i{k}_{arg.arg}"
                if isinstance(val, ast.Name) and not any(isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store) and x.id == arg.arg for x in ast.walk(t)):
                    ren[arg.arg] = val.id
                else:
                    s.assign(ren[arg.arg], val, node)
            for x in ast.walk(t):
                if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store): ren.setdefault(x.id, f"_i{k}_{x.id}")
            for x in ast.walk(t):
                if isinstance(x, ast.Name):
                    if x.id in ren: x.id = ren[x.id]
                    elif x.id in g2 and x.id != "cuda":
                        if x.id not in s.g: s.g[x.id] = g2[x.id]
                        elif s.g[x.id] is not g2[x.id]:
                            new = f"_g{k}_{x.id}"; s.g[new] = g2[x.id]; x.id = new
            body = t.body
            ret = body[-1] if isinstance(body[-1], ast.Return) else None
            rest = body[:-1] if ret is not None else body
            for st in rest:
                for x in ast.walk(st):
                    if isinstance(x, ast.Return): s.fail(x, "early return in a device function with barriers; not supported yet")
            saved = s.pre
            inner = s.stmts(rest)
            s.pre = []
            val = s.visit(ret.value) if ret is not None and ret.value is not None else None
            tail = s.pre
            s.pre = saved + inner + tail
            if val is None: return ast.Name("_none", ast.Load())
            s.assign(f"_r{k}", val, node)
            return ast.Name(f"_r{k}", ast.Load())
        return node


def is_bar(st): return isinstance(st, ast.Expr) and isinstance(st.value, ast.Call) and cname(st.value.func) in BAR
def is_shfl(st): return isinstance(st, ast.Assign) and isinstance(st.value, ast.Call) and isinstance(st.value.func, ast.Name) and st.value.func.id == "__shfl__"
def holds(st): return any(is_bar(x) or is_shfl(x) for x in ast.walk(st) if isinstance(x, ast.stmt))
def stored(node): return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
def names(node): return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
def is_alloc(st): return isinstance(st, ast.Assign) and isinstance(st.value, ast.Call) and cname(st.value.func) in ("shared.array", "local.array")
def alloc_args(call):
    kw = {k.arg: k.value for k in call.keywords}
    return (call.args[0] if call.args else kw["shape"]), (call.args[1] if len(call.args) > 1 else kw["dtype"])


def build(fn, block, argtypes):
    g = globals_of(fn)
    tree = get_tree(fn)
    fail_at = lambda node, why: (_ for _ in ()).throw(KernelError(f"{fn.__code__.co_filename}:{getattr(node, 'lineno', '?')}: kernel {fn.__name__}: {why}"))
    params = [a.arg for a in tree.args.args]
    p = Prep(g, fn); body = p.stmts(tree.body)
    for x in ast.walk(ast.Module(body, [])):
        if isinstance(x, ast.Call):
            c = cname(x.func)
            if c and c.startswith("atomic."):
                if c[7:] not in ATOMIC_FN: fail_at(x, f"cuda.{c} is not supported yet")
                x.func = ast.Name(f"_atomic_{c[7:]}", ast.Load())
                p.extra[x.func.id] = ATOMIC_FN[c[7:]]
    atomics = {x.args[0].id for x in ast.walk(ast.Module(body, [])) if isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id.startswith("_atomic_") and isinstance(x.args[0], ast.Name)}
    varying = set()
    bx, by, bz = block
    def vary_expr(e):
        for x in ast.walk(e):
            if isinstance(x, ast.Name) and x.id in varying: return True
            c = cname(x) if isinstance(x, ast.Attribute) else None
            if c and (c.startswith("threadIdx") or c in ("laneid",)): return True
            if isinstance(x, ast.Call) and cname(x.func) in ("grid",): return True
            if isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id.startswith("_atomic_"): return True
            if isinstance(x, ast.Subscript) and not (isinstance(x.value, ast.Attribute) and x.value.attr == 'shape'): return True
        return False
    def mark(sts, ctl):
        for st in sts:
            if isinstance(st, (ast.For, ast.While, ast.If)):
                c = ctl or vary_expr(st.iter if isinstance(st, ast.For) else st.test)
                if isinstance(st, (ast.For, ast.While)) and any(isinstance(x, (ast.Break, ast.Return, ast.Continue)) for x in ast.walk(st)): c = True
                if isinstance(st, ast.For) and c: varying.update(stored(st.target))
                mark(st.body, c); mark(st.orelse, c)
            elif isinstance(st, ast.Assign) and not is_alloc(st):
                if ctl or is_shfl(st) or vary_expr(st.value):
                    for t in st.targets:
                        if not isinstance(t, ast.Subscript): varying.update(stored(t))
            elif isinstance(st, ast.AugAssign) and isinstance(st.target, ast.Name):
                if ctl or vary_expr(st.value): varying.add(st.target.id)
    n = -1
    while n != len(varying): n = len(varying); mark(body, False)
    rid = itertools.count(); allocs = []
    def take_allocs(sts):
        out = []
        for st in sts:
            if is_alloc(st): allocs.append(st)
            else:
                if isinstance(st, (ast.If, ast.For, ast.While)):
                    st.body = take_allocs(st.body) or [ast.Pass()]; st.orelse = take_allocs(st.orelse)
                out.append(st)
        return out
    body = take_allocs(body)
    local = {st.targets[0].id for st in allocs if cname(st.value.func) == "local.array"}
    varying -= local
    def split(sts, top=False):
        out, cur = [], []
        def flush():
            nonlocal cur
            if cur: out.append(("region", next(rid), cur)); cur = []
        for st in sts:
            if is_bar(st): flush()
            elif is_shfl(st): flush(); out.append(("region", next(rid), [st]))
            elif holds(st):
                flush()
                ctl = st.iter if isinstance(st, ast.For) else st.test
                if vary_expr(ctl): fail_at(st, "barrier or warp operation under a thread-dependent condition; not supported yet")
                for x in ast.walk(st):
                    if isinstance(x, (ast.Break, ast.Continue)): fail_at(x, "break/continue in a loop with barriers; not supported yet")
                out.append(("ctl", st, split(st.body), split(st.orelse)))
            else: cur.append(st)
        flush(); return out
    plan = split(body, True)
    def check_return(pl, last):
        for k, it in enumerate(pl):
            if it[0] == "region":
                for st in it[2]:
                    for x in ast.walk(st):
                        if isinstance(x, ast.Return) and not (last and k == len(pl) - 1):
                            fail_at(x, "early return before a barrier; not supported yet")
                def loops(st, inl):
                    if isinstance(st, ast.Return) and inl: fail_at(st, "return inside a loop; not supported yet")
                    for ch in ast.iter_child_nodes(st): loops(ch, inl or isinstance(st, (ast.For, ast.While)))
                for st in it[2]: loops(st, False)
            else: check_return(it[2], False); check_return(it[3], False)
    check_return(plan, True)
    # a uniform variable that thread code assigns must be reset for each thread: keep it per thread if it is assigned more than once
    counts = {}
    for x in ast.walk(ast.Module(body, [])):
        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store): counts[x.id] = counts.get(x.id, 0) + 1
        if isinstance(x, ast.AugAssign) and isinstance(x.target, ast.Name): counts[x.target.id] = counts.get(x.target.id, 0) + 1
    def demote(pl):
        for it in pl:
            if it[0] == "region":
                for st in it[2]:
                    for v in stored(st):
                        if counts[v] > 1 and v not in local: varying.add(v)
            else: demote(it[2]); demote(it[3])
    demote(plan)
    for it in plan:
        pass
    def recheck(pl):
        for it in pl:
            if it[0] == "ctl":
                ctl = it[1].iter if isinstance(it[1], ast.For) else it[1].test
                if vary_expr(ctl): fail_at(it[1], "barrier under a condition that could not be proven the same for all threads")
                recheck(it[2]); recheck(it[3])
    recheck(plan)
    use = {}
    def scan(pl):
        for it in pl:
            if it[0] == "region":
                for st in it[2]:
                    for v in names(st) & varying: use.setdefault(v, set()).add(it[1])
            else: scan(it[2]); scan(it[3])
    scan(plan)
    lane = {v for v, r in use.items() if len(r) > 1}
    def loops(pl, inl):
        for it in pl:
            if it[0] == "region" and inl:
                lane.update(set().union(*[stored(s) for s in it[2]]) & varying & {v for v in use})
            elif it[0] == "ctl": loops(it[2], inl or isinstance(it[1], (ast.For, ast.While))); loops(it[3], inl)
    loops(plan, False)
    remat = {}
    for st in body:
        if isinstance(st, ast.Assign) and isinstance(st.targets[0], ast.Name) and counts[st.targets[0].id] == 1 and not is_shfl(st):
            pure = not any(isinstance(x, ast.Call) and cname(x.func) != "grid" for x in ast.walk(st.value)) and not any(isinstance(x, ast.Subscript) and not (isinstance(x.value, ast.Attribute) and x.value.attr == "shape") for x in ast.walk(st.value))
            if pure and all((n not in varying and counts.get(n, 0) <= 1) or n in remat for n in names(st.value)): remat[st.targets[0].id] = st
    lane -= set(remat)
    # arrays bound per thread cannot be stored
    class Twin(ast.NodeTransformer):
        def visit_Attribute(s, x):
            c = cname(x)
            if c and c.split(".")[0] in ("threadIdx", "blockIdx", "blockDim", "gridDim", "laneid", "warpsize"): return ast.Name("_i32", ast.Load())
            return s.generic_visit(x)
        def visit_Call(s, x):
            c = cname(x.func)
            if c in ("grid", "gridsize"):
                k = x.args[0].value
                return ast.Name("_i64", ast.Load()) if k == 1 else ast.parse("(" + ", ".join(["_i64"] * k) + ")", mode="eval").body
            if c in ("shared.array", "local.array"):
                a = alloc_args(x)
                return ast.Call(ast.Name("_np_empty", ast.Load()), list(a), [])
            if c is not None and c.split(".")[0] not in ("atomic",):
                fail_at(x, f"cuda.{c} is not supported yet")
            if isinstance(x.func, ast.Name) and x.func.id == "__shfl__":
                m = x.args[0].value
                if m == "ballot_sync": return ast.Name("_u32", ast.Load())
                if m.startswith("syncthreads"): return ast.Name("_i32", ast.Load())
                if m in VOTE: return ast.Name("_true", ast.Load())
                return s.visit(x.args[1])
            return s.generic_visit(x)
        def visit_Expr(s, st):
            return ast.Pass() if is_bar(st) else s.generic_visit(st)
    tw = copy.deepcopy(tree); tw.body = [Twin().visit(copy.deepcopy(st)) for st in [*allocs, *body]]
    tw.body = [ast.parse("_i32 = _np.int32(1); _i64 = _np.int64(1); _u32 = _np.uint32(1)").body[i] for i in range(3)] + [ast.parse("_true = True").body[0], *tw.body]; tw.name = "twin"; tw.returns = None
    env = dict(g); env.update(p.extra); env.update(_np=np, _np_empty=np.empty, _none=None)
    src = ast.unparse(ast.fix_missing_locations(ast.Module([tw], [])))
    exec(src, env); d = njit(env["twin"]); d.compile(argtypes)
    tm = d.overloads[tuple(argtypes)].type_annotation.typemap
    def ty(v):
        t = [types.unliteral(tm[k]) for k in tm if k == v or k.startswith(v + ".")]
        if any(not isinstance(x, (types.Number, types.Boolean)) for x in t): fail_at(tree, f"{v} holds {t} across a barrier; only numbers can")
        u = t[0]
        for x in t[1:]: u = Context().unify_types(u, x) or u
        return str(as_dtype(u))
    class Emit(ast.NodeTransformer):
        def visit_Name(s, x):
            if x.id in lane: return ast.Name(x.id + "_", x.ctx)
            return x
        def visit_Subscript(s, x):
            if isinstance(x.value, ast.Name) and x.value.id in local:
                i = s.visit(x.slice)
                i = list(i.elts) if isinstance(i, ast.Tuple) else [i]
                return ast.Subscript(x.value, ast.Tuple([*i, ast.Name("_t", ast.Load())], ast.Load()), x.ctx)
            return s.generic_visit(x)
        def visit_Attribute(s, x):
            c = cname(x)
            if c:
                a, _, b = c.partition(".")
                m = {"threadIdx": f"_t{b}", "blockIdx": f"_b{b}", "blockDim": str(dict(x=bx, y=by, z=bz).get(b)), "gridDim": f"_g{b}"}
                if a in m: return ast.parse(m[a], mode="eval").body
                if c == "laneid": return ast.parse("_t & 31", mode="eval").body
                if c == "warpsize": return ast.Constant(32)
            return s.generic_visit(x)
        def visit_Call(s, x):
            if cname(x.func) in ("grid", "gridsize"):
                e = [f"(_bx*{bx}+_tx)", f"(_by*{by}+_ty)", f"(_bz*{bz}+_tz)"] if cname(x.func) == "grid" else [f"(_gx*{bx})", f"(_gy*{by})", f"(_gz*{bz})"]
                e = e[: x.args[0].value]
                return ast.parse(e[0] if len(e) == 1 else "(" + ", ".join(e) + ")", mode="eval").body
            return s.generic_visit(x)
        def visit_Return(s, st): return ast.Continue()
    L = []
    def w(ind, s): L.append("    " * ind + s)
    A = ", ".join(params)
    NT = bx * by * bz
    def sh(pl):
        for it in pl:
            if it[0] == "region":
                for st in it[2]:
                    if is_shfl(st): lane.add(st.targets[0].id); lane.add(st.value.args[1].id)
            else: sh(it[2]); sh(it[3])
    sh(plan)
    w(0, f"def kern(_grid, _first, _last, _shared, {A}):")
    w(1, "_gx, _gy, _gz = _grid")
    for v in sorted(lane): w(1, f"{v} = _np.empty({NT}, _np.{ty(v)})")
    dynamic = False
    for st in allocs:
        tgt = st.targets[0].id; shape, dt = alloc_args(st.value)
        shp = ast.unparse(shape)
        if cname(st.value.func) == "shared.array":
            if shp == "0" or (isinstance(shape, ast.Name) and g.get(shape.id) == 0):
                dynamic = True
                w(1, f"{tgt} = _shared.view({ast.unparse(dt)})")
            else:
                w(1, f"{tgt} = _np.empty({shp}, {ast.unparse(dt)})")
        else:
            dims = [ast.unparse(e) for e in shape.elts] if isinstance(shape, ast.Tuple) else [shp]
            if isinstance(shape, ast.Name) and isinstance(g.get(shape.id), tuple): dims = [str(v) for v in g[shape.id]]
            w(1, f"{tgt} = _np.empty(({', '.join(dims)}, {NT}), {ast.unparse(dt)})")
    w(1, "for _block in range(_first, _last):")
    w(2, "_bx = _block % _gx"); w(2, "_by = _block // _gx % _gy"); w(2, "_bz = _block // (_gx * _gy)")
    def emit(pl, ind):
        if not pl: w(ind, "pass")
        for it in pl:
            if it[0] == "region":
                vote = is_shfl(it[2][0]) and it[2][0].value.args[0].value in VOTE
                if vote:
                    st = it[2][0]; c = st.value.args[0].value; sv = st.value.args[1].id; dst = st.targets[0].id
                    wid = NT if c.startswith("syncthreads") else 32
                    w(ind, f"for _w in range(0, {NT}, {wid}):")
                    e = f"min(_w + {wid}, {NT})"
                    w(ind+1, "_acc = 0")
                    w(ind+1, f"for _t in range(_w, {e}):")
                    w(ind+2, f"if {sv}[_t]: _acc += {'1 << (_t - _w)' if c == 'ballot_sync' else '1'}")
                    val = {"any_sync": "_acc > 0", "all_sync": f"_acc == {e} - _w", "ballot_sync": "_acc", "syncthreads_or": "_acc > 0", "syncthreads_and": f"_acc == {NT}", "syncthreads_count": "_acc"}[c]
                    w(ind+1, f"for _t in range(_w, {e}): {dst}[_t] = {val}")
                    continue
                w(ind, f"for _tz in range({bz}):"); w(ind+1, f"for _ty in range({by}):"); w(ind+2, f"for _tx in range({bx}):")
                w(ind+3, f"_t = (_tz*{by}+_ty)*{bx}+_tx")
                used = set().union(*[names(st) for st in it[2]])
                own = set().union(*[stored(st) for st in it[2]])
                need = []
                def want(v):
                    if v in remat and v not in need and v not in own:
                        for n in names(remat[v].value): want(n)
                        need.append(v)
                for v in sorted(used): want(v)
                for v in need: w(ind+3, ast.unparse(Emit().visit(copy.deepcopy(remat[v]))))
                if not is_shfl(it[2][0]):
                    for v in sorted(used & lane): w(ind+3, f"{v}_ = {v}[_t]")
                jump = any(isinstance(x, ast.Return) for st in it[2] for x in ast.walk(st))
                for st in it[2]:
                    if is_shfl(st):
                        mode = st.value.args[0].value; sv = st.value.args[1].id; arg = ast.unparse(Emit().visit(copy.deepcopy(st.value.args[2]))); dst = st.targets[0].id
                        for v in sorted(names(st.value.args[2]) & lane): w(ind+3, f"{v}_ = {v}[_t]")
                        src_ = {"shfl_down_sync": f"_t+({arg}) if (_t&31)+({arg}) < 32 else _t", "shfl_xor_sync": f"_t ^ ({arg})", "shfl_up_sync": f"_t-({arg}) if (_t&31)>=({arg}) else _t", "shfl_sync": f"(_t & ~31) + (({arg}) & 31)"}[mode]
                        if NT % 32: src_ = f"min({src_}, {NT - 1})"
                        w(ind+3, f"{dst}[_t] = {sv}[{src_}]")
                    else:
                        w(ind+3, f"# line {st.lineno}")
                        for ln in ast.unparse(ast.fix_missing_locations(Emit().visit(copy.deepcopy(st)))).split("\n"): w(ind+3, ln)
                if not is_shfl(it[2][0]):
                    for v in sorted(own & lane): w(ind+3, f"{v}[_t] = {v}_")
            else:
                st = it[1]
                head = f"for {ast.unparse(st.target)} in {ast.unparse(Emit().visit(copy.deepcopy(st.iter)))}:" if isinstance(st, ast.For) else f"{'while' if isinstance(st, ast.While) else 'if'} {ast.unparse(Emit().visit(copy.deepcopy(st.test)))}:"
                w(ind, head); emit(it[2], ind+1)
                if it[3]: w(ind, "else:"); emit(it[3], ind+1)
    emit(plan, 2)
    code = "\n".join(L)
    env = dict(g); env.update(p.extra); env.update(_np=np, _none=None)
    try:
        exec(code, env)
    except SyntaxError as e:
        raise KernelError(f"{fn.__name__}: {e}\n{code}") from e
    d = njit(env["kern"], nogil=True, error_model="numpy", fastmath={"contract"})
    sig = (types.UniTuple(types.int64, 3), types.int64, types.int64, types.uint8[::1], *argtypes)
    try:
        d.compile(sig)
    except Exception as e:
        raise KernelError(f"{fn.__name__}: {e}\n{code}") from e
    return d.overloads[sig].entry_point, code, bool(atomics & set(params)), dynamic


class CompiledKernel:
    def __init__(self, py_func, arg_types, block):
        self._run, self.source, self.has_global_atomics, self.uses_dynamic_shared = build(py_func, block, tuple(arg_types))
    def __call__(self, grid, first_block, last_block, shared_bytes, *args):
        self._run(grid, first_block, last_block, np.empty(shared_bytes, np.uint8), *args)


def compile_kernel(py_func, arg_types, block, *, warp_size=32):
    return CompiledKernel(py_func, arg_types, block)
