/* Creating a handle: constructors, and taking ownership of a new struct. */
#include "handles/internal.h"

#include <unistd.h>

/*
 * Check that a new struct has the type required by the handle's class and each base class, because
 * the device receives it as that type. Runs no Python code; 0, or -1 with an exception.
 */
static int check_struct(const struct rp_handle *h, PyObject *made)
{
	PyObject *items = PyDict_Items(rp_python.structs);
	PyObject *type = items ? PyObject_CallFunctionObjArgs(rp_python.type_of, made, NULL) : NULL;
	int wrong = !type;

	for (Py_ssize_t i = 0; !wrong && i < PyList_Size(items); i++) {
		PyObject *class, *wanted;

		if (!PyArg_ParseTuple(PyList_GetItem(items, i), "OO", &class, &wanted))
			wrong = 1;
		else if (PyType_IsSubtype(Py_TYPE((PyObject *)h), (PyTypeObject *)class) &&
			 PyObject_RichCompareBool(type, wanted, Py_EQ) != 1)
			wrong = PyErr_Format(PyExc_TypeError, "%R is of %R, not of %R", class,
					     wanted, type) == NULL;
	}
	Py_XDECREF(type);
	Py_XDECREF(items);
	return wrong ? -1 : 0;
}

void rp_read_keys(struct rp_handle *h)
{
	const struct ibv_mr *mr = h->form ? h->address : NULL;

	if (mr) {
		RP_STORE(&h->lkey, mr->lkey);
		RP_STORE(&h->rkey, mr->rkey);
	}
}

/* Raise ClosedError: the parent of a new handle is about to be closed. */
static void raise_ending(struct rp_handle *parent)
{
	PyErr_Format(rp_errors.closed, "%S is being closed", parent);
}

int rp_join_parents(PyObject *parents)
{
	Py_ssize_t count = PyTuple_Size(parents);

	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *parent = PyTuple_GetItem(parents, i);

		if (!rp_is_handle(parent))
			PyErr_SetString(PyExc_TypeError, "a parent is not a handle");
		else if (RP_LOAD(&((struct rp_handle *)parent)->emptied))
			raise_ending((struct rp_handle *)parent);
		else if (!rp_enter((struct rp_handle *)parent, CHILD))
			rp_raise_closed((struct rp_handle *)parent);
		else
			continue;
		rp_leave_parents(parents, i);
		return -1;
	}
	return 0;
}

/*
 * Take ownership of a new struct; 0, or -1 with an exception. If a later step fails for lack of
 * memory, the handle is open, but can only be closed.
 */
static int take_made(struct rp_handle *h, PyObject *create, PyObject *made)
{
	PyObject *cast, *number;
	int there = PyObject_IsTrue(made), failed;

	if (there <= 0) {
		if (!there)
			rp_raise_failed(create, -1);
		return -1;
	}
	h->cdata = Py_NewRef(made);
	cast = PyObject_CallFunctionObjArgs(rp_python.to_number, made, NULL);
	number = cast ? PyNumber_Long(cast) : NULL;
	if (number && !check_struct(h, made))
		h->address = PyLong_AsVoidPtr(number);
	Py_XDECREF(number);
	Py_XDECREF(cast);
	failed = !h->address;
	if (failed)
		h->spoiled = 1;
	else {
		rp_read_keys(h);
		__atomic_and_fetch(&h->word, ~RP_SHUT, __ATOMIC_SEQ_CST);
	}
	/* Last: from here on, any thread may close the handle. */
	set_state(h, OPEN);
	if (failed)
		return -1;
	if (rp_exiting == RP_CLOSED_ALL)
		rp_give_up(h);
	return 0;
}

/*
 * Call `create` and take ownership of the struct it returns. Returns a new reference to its cdata,
 * or NULL; in both cases *owner says whether the handle owns the struct.
 */
static PyObject *make(struct rp_handle *h, PyObject *create, PyObject *args, int *owner)
{
	struct rp_use uses[MAX_ARGS], own;
	PyObject *listed, *made = NULL;
	int used = 0;

	*owner = 0;
	if (rp_join_parents(h->parents))
		return NULL;
	rp_push_use(rp_thread(), h, &own);
	listed = PyWeakref_NewRef((PyObject *)h, NULL);
	if (listed && !rp_list_as(h, listed)) {
		made = rp_call_with_structs(create, NULL, args, uses, &used);
		/* No Python code runs from here until the handle owns the struct. */
		if (made && take_made(h, create, made))
			Py_CLEAR(made);
		*owner = h->cdata != NULL;
		if (!*owner)
			rp_unlist(h);
	}
	Py_XDECREF(listed);
	rp_end_uses(uses, used);
	rp_pop_use(rp_thread(), &own);
	if (!*owner)
		rp_leave_parents(h->parents, PyTuple_Size(h->parents));
	return made;
}

static int change_state(struct rp_handle *h, char from, char to)
{
	return __atomic_compare_exchange_n(&h->state, &from, to, 0, __ATOMIC_SEQ_CST,
					   __ATOMIC_SEQ_CST);
}

static void raise_made(PyObject *self)
{
	PyErr_Format(rp_errors.error, "%S %s made; __init__ is not called again", self,
		     state_of((struct rp_handle *)self) < OPEN ? "is being" : "has been");
}

/*
 * Whether a parent is about to be closed: by close_all(), or once the new handle, its only child,
 * is gone.
 */
static int is_ending(const struct rp_handle *parent, PyObject *parents)
{
	uint64_t count = 0;

	for (Py_ssize_t i = 0; i < PyTuple_Size(parents); i++)
		count += PyTuple_GetItem(parents, i) == (PyObject *)parent;
	return RP_LOAD(&parent->emptied) ||
	       (RP_LOAD(&parent->deferred_by) == BY_CALLER &&
		CHILDREN(load(&parent->word)) == count);
}

/* Raise ClosedError if a parent of a new handle is about to be closed; 0, or -1. */
static int refuse_ending_parent(struct rp_handle *h)
{
	PyObject *parents = rp_get_now((PyObject *)h, &h->parents);
	int failed = 0;

	for (Py_ssize_t i = 0; !failed && parents && i < PyTuple_Size(parents); i++) {
		struct rp_handle *parent = (struct rp_handle *)PyTuple_GetItem(parents, i);

		failed = is_ending(parent, parents);
		if (failed)
			raise_ending(parent);
	}
	Py_XDECREF(parents);
	return -failed;
}

/*
 * The constructor has failed. If it created no struct, another constructor may begin. If it created
 * one, close the handle, because a traceback may keep it alive for a long time. If the device
 * refuses, the handle is kept (close.c).
 */
static void undo_making(struct rp_handle *h)
{
	uintptr_t maker = __atomic_exchange_n(&h->maker, 0, __ATOMIC_SEQ_CST);

	if ((maker == this_thread() && change_state(h, BEGUN, NEW)) || is_done(h) ||
	    rp_exiting == RP_CLOSED_ALL)
		return;
	if (rp_thread()->top)
		rp_defer_close(h, BY_CALLER);
	else
		rp_close_quietly(h);
}

/*
 * _begin_making(): mark the constructor as begun, or raise if another one has begun. Returns the
 * number of the constructor, for _undo_making().
 */
PyObject *rp_begin_making(PyObject *self, PyObject *unused)
{
	struct rp_handle *h = (struct rp_handle *)self;
	PyObject *number;

	(void)unused;
	if (!change_state(h, NEW, BEGUN)) {
		raise_made(self);
		return NULL;
	}
	__atomic_store_n(&h->maker, this_thread(), __ATOMIC_SEQ_CST);
	number = PyLong_FromUnsignedLong(RP_ADD(&h->constructors, 1));
	if (!number)
		undo_making(h);
	rp_ask_main();
	return number;
}

/*
 * _undo_making(number): called when the constructor has failed, or was interrupted just after it
 * ended. Does
 * nothing if another constructor has begun since.
 */
PyObject *rp_undo_making(PyObject *self, PyObject *number)
{
	struct rp_handle *h = (struct rp_handle *)self;

	if (PyLong_AsUnsignedLong(number) == RP_LOAD(&h->constructors))
		undo_making(h);
	return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/*
 * _construct(init, args, options): run a constructor. As in a verb, this thread's closes are
 * deferred until the constructor ends; it fails if it would keep a parent from closing.
 */
PyObject *rp_construct(PyObject *self, PyObject *args)
{
	struct rp_handle *h = (struct rp_handle *)self;
	PyObject *init, *values, *options, *done;
	unsigned int process = rp_process;

	if (!PyArg_ParseTuple(args, "OO!O!", &init, &PyTuple_Type, &values, &PyDict_Type, &options))
		return NULL;
	rp_thread()->making++;
	done = PyObject_Call(init, values, options);
	if (done && refuse_ending_parent(h))
		Py_CLEAR(done);
	/* After a fork in the constructor, the child process is not in a constructor. */
	if (process == rp_process)
		rp_thread()->making--;
	/* An exception that is set stays set. */
	if (done)
		__atomic_store_n(&h->maker, 0, __ATOMIC_SEQ_CST);
	else
		undo_making(h);
	rp_run_deferred_if_idle(rp_thread());
	return done;
}

/*
 * _make(create, args, destroy, parents, keeps=None, access=0, start=0, unreadable=False, form=None):
 * call create with args and take ownership of the struct it returns, as a child of each parent. Only
 * a memory region has a form.
 */
PyObject *rp_make_handle(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "create", "args",   "destroy", "parents",    "keeps",
				 "access", "start", "unreadable", "form", NULL };
	struct rp_handle *h = (struct rp_handle *)self;
	PyObject *create, *values, *destroy, *parents, *keeps = NULL, *form = NULL, *made;
	unsigned long long start = 0;
	unsigned int access = 0;
	int unreadable = 0, owner;
	char before;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!OO!|OIKpO", names, &create,
					 &PyTuple_Type, &values, &destroy, &PyTuple_Type,
					 &parents, &keeps, &access, &start, &unreadable,
					 &form))
		return NULL;
	if (rp_exiting == RP_CLOSED_ALL) {
		PyErr_SetString(rp_errors.closed, "nothing can be opened: the interpreter is exiting");
		return NULL;
	}
	before = (char)state_of(h);
	if (before > BEGUN || !change_state(h, before, MAKING)) {
		raise_made(self);
		return NULL;
	}
	h->process = rp_process;
	h->pid = (int)getpid();
	h->access = access;
	h->start = start;
	h->unreadable = (char)unreadable;
	h->keeps = Py_XNewRef(keeps);
	h->form = Py_XNewRef(form);
	h->destroy = Py_NewRef(destroy);
	h->parents = Py_NewRef(parents);
	made = make(h, create, values, &owner);
	if (!owner)
		rp_drop_held(h, before);
	return made;
}
