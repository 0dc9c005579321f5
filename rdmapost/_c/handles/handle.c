/* A handle's users: verbs, children and work requests in flight; and the list of open handles. */
#include "handles/internal.h"

PyObject *rp_handle_type;
int rp_exiting;
PyObject *(*rp_progress)(void);
int rp_deaf;
struct rp_python rp_python;

int rp_list_as(struct rp_handle *h, PyObject *value)
{
	PyObject *key = PyLong_FromVoidPtr(h);
	int failed = !key || (value ? PyDict_SetItem(rp_python.open, key, value) :
				      PyDict_DelItem(rp_python.open, key));

	Py_XDECREF(key);
	return failed ? -1 : 0;
}

void rp_unlist(struct rp_handle *h)
{
	struct rp_error error = rp_save_error();

	/* If memory runs out, the entry stays: readers skip closed handles. */
	if (rp_list_as(h, NULL))
		PyErr_Clear();
	rp_restore_error(error);
}

int rp_list_again(struct rp_handle *h)
{
	struct rp_error error = rp_save_error();
	PyObject *listed = PyWeakref_NewRef((PyObject *)h, NULL);
	int done = listed && !rp_list_as(h, listed);

	PyErr_Clear();
	Py_XDECREF(listed);
	rp_restore_error(error);
	return done;
}

/* ---- users ---------------------------------------------------------------- */

int rp_enter(struct rp_handle *h, uint64_t user)
{
	uint64_t word = load(&h->word);

	do {
		if (h->process != rp_process)
			return 0;
		/* Until the struct is destroyed, the closer may use it, but not create children. */
		if (word & RP_SHUT &&
		    (user == CHILD || !is_closer(h) || !h->releasing))
			return 0;
	} while (!__atomic_compare_exchange_n(&h->word, &word, word + user, 0,
					      __ATOMIC_SEQ_CST,
					      __ATOMIC_SEQ_CST));
	return 1;
}

int rp_is_busy(struct rp_handle *h)
{
	return (load(&h->word) & ~RP_SHUT) || load(&h->posted) ||
	       __atomic_load_n(&h->windows, __ATOMIC_SEQ_CST);
}

int rp_is_open(const struct rp_handle *h)
{
	return h->process == rp_process && !(load(&h->word) & RP_SHUT);
}

int rp_in_verb(void)
{
	return rp_thread()->top || rp_thread()->making;
}

int rp_begin_use_shut(struct rp_handle *h, struct rp_use *use)
{
	if (!rp_enter(h, 1))
		return -1;
	rp_push_use(rp_thread(), h, use);
	return 0;
}

int rp_begin_use(struct rp_handle *h, struct rp_use *use)
{
	return rp_begin_use_by(rp_thread(), h, use);
}

PyObject *rp_get_now(PyObject *self, PyObject *const *member)
{
	PyObject *value;

	RP_BEGIN(self);
	value = Py_XNewRef(*member);
	RP_END();
	return value;
}

void rp_give_up(struct rp_handle *h)
{
	__atomic_or_fetch(&h->word, RP_SHUT, __ATOMIC_SEQ_CST);
}

/* ---- binders -------------------------------------------------------------- */

struct rp_binder *rp_new_binder(void)
{
	struct rp_binder *binder = PyMem_Malloc(sizeof(*binder));

	if (binder)
		*binder = (struct rp_binder){ .users = 1 };
	return binder;
}

void rp_drop_binder(struct rp_binder *binder)
{
	if (binder && !__atomic_sub_fetch(&binder->users, 1, __ATOMIC_SEQ_CST))
		PyMem_Free(binder);
}

void rp_note_binder(struct rp_handle *h, struct rp_binder *binder)
{
	if (h->binder)
		return;
	RP_ADD(&binder->users, 1);
	RP_STORE(&h->binder, binder);
}

/* ---- calls ---------------------------------------------------------------- */

void rp_raise_closed(struct rp_handle *h)
{
	if (h->process && h->process != rp_process)
		PyErr_Format(rp_errors.closed, "%S was opened by process %d; open the device again",
			     h, h->pid);
	else if (rp_exiting == RP_CLOSED_ALL)
		PyErr_Format(rp_errors.closed, "%S cannot be used: the interpreter is exiting", h);
	else if (h->spoiled)
		PyErr_Format(rp_errors.closed, "%S cannot be used: %s failed; close it", h,
			     h->address ? "its re-registration" : "its creation");
	else if (h->remaking)
		PyErr_Format(rp_errors.closed, "another thread is re-registering %S", h);
	else
		PyErr_Format(rp_errors.closed, "%S is closed", h);
}

void rp_raise_failed(PyObject *function, long code)
{
	/* Read errno first: another cffi call may change it. */
	PyObject *number = code == -1 ? PyObject_GetAttrString(rp_python.ffi, "errno") :
					PyLong_FromLong(labs(code));

	if (number)
		Py_XDECREF(PyObject_CallFunctionObjArgs(rp_python.failed, function, number, NULL));
	Py_XDECREF(number);
}

PyObject *rp_call_with_structs(PyObject *function, PyObject *self, PyObject *args,
			       struct rp_use *uses, int *used)
{
	Py_ssize_t nargs = PyTuple_Size(args), n = 0;
	PyObject *given[MAX_ARGS], *tuple = NULL, *result;

	*used = 0;
	if (nargs > MAX_ARGS) {
		PyErr_SetString(PyExc_TypeError, "too many arguments");
		return NULL;
	}
	for (; n < nargs; n++) {
		PyObject *arg = self && !n ? self : PyTuple_GetItem(args, n);
		struct rp_handle *h = rp_is_handle(arg) ? (struct rp_handle *)arg : NULL;

		if (h && rp_begin_use(h, &uses[*used])) {
			/*
			 * This may run any Python code, which could find an incomplete tuple
			 * through the collector; so the arguments are put in an array first.
			 */
			rp_raise_closed(h);
			break;
		}
		*used += h != NULL;
		given[n] = Py_NewRef(h ? h->cdata : arg);
	}
	if (n == nargs)
		tuple = rp_make_tuple((PyObject *)&PyTuple_Type, given, nargs);
	else
		while (n)
			Py_DECREF(given[--n]);
	result = tuple ? PyObject_Call(function, tuple, NULL) : NULL;
	Py_XDECREF(tuple);
	return result;
}
