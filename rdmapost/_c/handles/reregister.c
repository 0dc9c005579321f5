/* Re-registering a memory region: new memory, access or PD, same handle. */
#include "handles/internal.h"

/* What a region is to become. */
struct registration {
	PyObject *parents, *keeps;
	unsigned int access;
	unsigned long long start;
	int unreadable;
	PyObject *form;
	PyObject *attributes; /* to set: tuples (member descriptor, object, value) */
};

enum { UNCHANGED, CHANGED, SPOILED };

/*
 * The state in which ibv_rereg_mr has left a region; `code` is the errno, or 0 if CHANGED or if an
 * exception is set. A failed call has spoiled the region unless its result says otherwise, or the
 * device lacks the verb.
 */
static int outcome(PyObject *result, long *code)
{
	long said = result && result != Py_None ? PyLong_AsLong(result) : 0;
	PyObject *number;

	*code = 0;
	if (!result)
		return UNCHANGED;
	if (said == 0 || said == IBV_REREG_MR_ERR_DO_FORK_OLD)
		return CHANGED;
	number = PyObject_GetAttrString(rp_python.ffi, "errno");
	*code = number ? PyLong_AsLong(number) : EIO;
	Py_XDECREF(number);
	PyErr_Clear();
	if (*code <= 0)
		*code = EIO;
	if (said == IBV_REREG_MR_ERR_INPUT || said == IBV_REREG_MR_ERR_DONT_FORK_NEW ||
	    *code == EOPNOTSUPP || *code == ENOSYS)
		return UNCHANGED;
	return SPOILED;
}

/* Check the attributes to set; 0, or -1 with an exception. */
static int check_attributes(PyObject *attributes)
{
	for (Py_ssize_t i = 0; i < PyTuple_Size(attributes); i++) {
		PyObject *each = PyTuple_GetItem(attributes, i);

		if (PyTuple_CheckExact(each) && PyTuple_Size(each) == 3 &&
		    Py_IS_TYPE(PyTuple_GetItem(each, 0), &PyMemberDescr_Type))
			continue;
		PyErr_SetString(PyExc_TypeError, "not an attribute in __slots__ to set");
		return -1;
	}
	return 0;
}

/*
 * Set the attributes. This allocates no memory. It runs no Python code either: the replaced form
 * keeps the old values alive.
 */
static void set_attributes(PyObject *attributes)
{
	descrsetfunc set = (descrsetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_set);

	for (Py_ssize_t i = 0; i < PyTuple_Size(attributes); i++) {
		PyObject *each = PyTuple_GetItem(attributes, i);

		if (set(PyTuple_GetItem(each, 0), PyTuple_GetItem(each, 1), PyTuple_GetItem(each, 2)))
			PyErr_Clear(); /* the object has no such attribute */
	}
}

/*
 * Have Python release the memory of the replaced form. If that fails, it is retried before the next
 * change, and when the region is closed. Returns the first exception, or none.
 */
static struct rp_error settle(struct rp_handle *h)
{
	struct rp_error error = { NULL, NULL, NULL };
	PyObject *replaced = NULL;

	if (!h->replaced || !rp_insist(h, "_settle", &error))
		return error;
	RP_BEGIN(h);
	replaced = h->replaced;
	h->replaced = NULL;
	RP_END();
	Py_XDECREF(replaced);
	return error;
}

/*
 * Call the verb once nothing uses the region. Release the old parents and memory only if the device
 * has the new ones; if it may have either, keep both. 0, or -1 with an exception.
 */
static int change(struct rp_handle *h, PyObject *function, PyObject *args,
		  const struct registration *new)
{
	PyObject *parents = h->parents, *keeps = h->keeps;
	PyObject *both_parents = PySequence_Concat(parents, new->parents);
	PyObject *both = PyTuple_Pack(2, keeps ? keeps : Py_None, new->keeps);
	struct rp_use uses[MAX_ARGS];
	PyObject *result;
	int used, now;
	long code;

	if (!both_parents || !both || check_attributes(new->attributes) || rp_join_parents(new->parents)) {
		Py_XDECREF(both_parents);
		Py_XDECREF(both);
		return -1;
	}
	result = rp_call_with_structs(function, (PyObject *)h, args, uses, &used);
	/* No Python code runs from here until the handle records the outcome. */
	now = outcome(result, &code);
	RP_BEGIN(h);
	if (now == CHANGED) {
		h->replaced = h->form;
		h->form = Py_NewRef(new->form);
		rp_read_keys(h);
		rp_count_ended(parents, offsetof(struct rp_handle, destroyed));
		h->parents = Py_NewRef(new->parents);
		h->keeps = Py_NewRef(new->keeps);
		h->access = new->access;
		h->start = new->start;
		h->unreadable = (char)new->unreadable;
	} else if (now == SPOILED) {
		h->parents = Py_NewRef(both_parents);
		h->keeps = Py_NewRef(both);
		h->spoiled = 1;
	}
	RP_END();
	if (now == CHANGED)
		set_attributes(new->attributes);
	rp_end_uses(uses, used);
	if (code)
		rp_raise_failed(function, code);
	if (now == CHANGED) {
		rp_restore_error(settle(h));
		rp_leave_parents(parents, PyTuple_Size(parents));
		rp_count_ended(parents, offsetof(struct rp_handle, finished));
	} else if (now == UNCHANGED) {
		rp_leave_parents(new->parents, PyTuple_Size(new->parents));
	}
	if (now != UNCHANGED) {
		struct rp_error error = rp_save_error();

		Py_DECREF(parents);
		Py_XDECREF(keeps);
		rp_restore_error(error);
	}
	Py_XDECREF(result);
	Py_DECREF(both_parents);
	Py_DECREF(both);
	return PyErr_Occurred() ? -1 : 0;
}

/*
 * Wait for running verbs, and refuse to change a region that work in flight or a window uses.
 * Returns 0, -1 with an exception, or 1 to stop.
 */
static int wait_until_unused(struct rp_handle *h, struct rp_pause *pause)
{
	PyObject *refused;

	while (VERBS(load(&h->word))) {
		int stopped = rp_await_others(h, pause);

		if (stopped)
			return stopped;
	}
	h->releasing = 1;
	while (load(&h->posted) || __atomic_load_n(&h->windows, __ATOMIC_SEQ_CST)) {
		refused = PyObject_CallMethod((PyObject *)h, "_refuse_change", NULL);
		if (!refused)
			return -1;
		Py_DECREF(refused);
	}
	return h->process != rp_process;
}

/*
 * _remake(function, args, before, parents, keeps, access, start, unreadable, form, attributes):
 * re-register a memory region by calling function with the struct and args, and make it a child of
 * the new parents. This waits until other threads' verbs on the region end, and refuses new verbs;
 * it raises if work in flight or a window uses the region. Once the device has changed the region,
 * the handle has the new form and attributes, whatever is raised later; then _settle() is called.
 * Returns False, without calling function, if the parents are no longer the tuple `before`, because
 * another thread has changed the region in the meantime.
 */
PyObject *rp_remake_handle(PyObject *self, PyObject *args)
{
	struct rp_handle *h = (struct rp_handle *)self;
	struct rp_pause pause = { 1, 0 };
	struct rp_use own;
	struct registration new;
	PyObject *function, *values, *before;
	int failed, claimed, stale = 0;

	if (!PyArg_ParseTuple(args, "OO!OO!OIKpOO!", &function, &PyTuple_Type, &values, &before,
			      &PyTuple_Type, &new.parents, &new.keeps, &new.access, &new.start,
			      &new.unreadable, &new.form, &PyTuple_Type, &new.attributes))
		return NULL;
	if (rp_in_verb()) {
		PyErr_Format(rp_errors.in_use,
			     "%S cannot be registered again in the middle of one of this thread's "
			     "verbs (this is a signal handler or a finalizer)", h);
		return NULL;
	}
	if (is_done(h) || rp_exiting == RP_CLOSED_ALL) {
		rp_raise_closed(h);
		return NULL;
	}
	/* While this use lasts, closes by signal handlers and finalizers are deferred. */
	rp_push_use(rp_thread(), h, &own);
	failed = rp_shut(h, &pause, 1);
	claimed = !failed;
	if (claimed && state_of(h) == OPEN && !h->spoiled) {
		failed = wait_until_unused(h, &pause);
		stale = h->parents != before;
		if (!failed && !stale)
			rp_restore_error(settle(h));
		failed = failed || PyErr_Occurred();
		if (!failed && !stale)
			failed = change(h, function, values, &new);
	} else if (claimed) {
		h->remaking = 0;
		failed = 1;
	}
	if (failed > 0 && !PyErr_Occurred())
		rp_raise_closed(h);
	if (claimed) {
		h->releasing = 0;
		if (state_of(h) == OPEN)
			rp_reopen(h);
		h->remaking = 0;
		rp_end_claim(h);
	}
	rp_pop_use(rp_thread(), &own);
	if (claimed)
		rp_yield_claim(h);
	return failed ? NULL : PyBool_FromLong(!stale);
}
