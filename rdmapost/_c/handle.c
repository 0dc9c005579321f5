/* The life of a handle (handle.h). */
#include "handle.h"

#include <pthread.h>
#include <structmember.h>
#include <time.h>
#include <unistd.h>

#define SHUT RP_SHUT
#define CHILD (1ull << 32)
#define VERBS(word) ((word) & UINT32_MAX)
#define CHILDREN(word) (((word) & ~SHUT) >> 32)

enum {
	MAX_ARGS = 8,
	LONGEST_PAUSE_US = 1000,
	WAIT_AT_EXIT_MS = 1000,
	MOST_INTERRUPTS = 16, /* of one hook that must come to its end */
};

/* Who closes. */
enum { NOBODY, BY_CALLER, BY_FINALIZER, AT_EXIT };

PyObject *rp_handle_type;

/* Given by rdmapost/_resource.py, and held for ever. */
static struct {
	PyObject *closed; /* ClosedError */
	PyObject *error; /* RdmaError */
	PyObject *failed; /* called with a function and an errno: raises */
	PyObject *ffi;
	PyObject *cast; /* ffi.cast */
	PyObject *number; /* what cffi calls uintptr_t */
} python;

static unsigned int process = 1;
static int exiting;

_Thread_local struct rp_thread *rp_current;
static _Thread_local struct rp_thread its_own;

struct rp_thread *rp_first_thread(void)
{
	static uint32_t threads;

	if (!its_own.mark)
		its_own.mark = (uint64_t)process << 32 |
			       __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
	return rp_current = &its_own;
}

void rp_stand_for(struct rp_thread *thread)
{
	rp_current = thread;
}

static void after_fork(void)
{
	struct rp_thread *me = rp_thread();

	process++;
	/* The rest is the parent's. */
	*me = (struct rp_thread){ .mark = (uint64_t)process << 32 | (uint32_t)me->mark };
	its_own.mark = me->mark;
}

static uintptr_t this_thread(void)
{
	return (uintptr_t)rp_thread();
}

static int is_foreign(const struct rp_handle *h)
{
	return h->made && h->process != process;
}

static uint64_t load(const uint64_t *word)
{
	return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

/* ---- all that are open ---------------------------------------------------- */

static struct rp_handle *newest;

#ifdef Py_GIL_DISABLED
static PyMutex list_mutex;
#define LOCK_LIST() PyMutex_Lock(&list_mutex)
#define UNLOCK_LIST() PyMutex_Unlock(&list_mutex)
#define MAY_BE_LISTED(object) PyUnstable_EnableTryIncRef(object)
#define TRY_INCREF(object) PyUnstable_TryIncRef(object)
#else
/* Whoever has the GIL. */
#define LOCK_LIST() (void)0
#define UNLOCK_LIST() (void)0
#define MAY_BE_LISTED(object) (void)(object)
static int TRY_INCREF(PyObject *object)
{
	if (Py_REFCNT(object) <= 0)
		return 0;
	Py_INCREF(object);
	return 1;
}
#endif

static void add_to_list(struct rp_handle *h)
{
	MAY_BE_LISTED((PyObject *)h);
	LOCK_LIST();
	h->older = newest;
	if (newest)
		newest->newer = h;
	newest = h;
	UNLOCK_LIST();
}

static void remove_from_list(struct rp_handle *h)
{
	LOCK_LIST();
	if (h->newer)
		h->newer->older = h->older;
	else if (newest == h)
		newest = h->older;
	if (h->older)
		h->older->newer = h->newer;
	h->newer = h->older = NULL;
	UNLOCK_LIST();
}

/* Count those that are wanted, and put new references to them into `into` where it is given. */
static size_t take_listed(PyObject **into, size_t room, const void *address)
{
	size_t count = 0;

	LOCK_LIST();
	for (struct rp_handle *h = newest; h; h = h->older) {
		if (h->process != process ||
		    (address && h->address != address))
			continue;
		if (into && (count == room || !TRY_INCREF((PyObject *)h)))
			continue;
		if (into)
			into[count] = (PyObject *)h;
		count++;
	}
	UNLOCK_LIST();
	return count;
}

/* A list of those that are open, the newest first; with an address, only the one that is there. */
static PyObject *list_open(const void *address)
{
	size_t count = take_listed(NULL, 0, address);
	PyObject **found = PyMem_Calloc(count + 1, sizeof(*found));
	PyObject *list = NULL;

	if (!found)
		return PyErr_NoMemory();
	count = take_listed(found, count, address);
	list = PyList_New((Py_ssize_t)count);
	for (size_t i = 0; i < count; i++) {
		if (list)
			PyList_SetItem(list, (Py_ssize_t)i, found[i]);
		else
			Py_DECREF(found[i]);
	}
	PyMem_Free(found);
	return list;
}

/* ---- users ---------------------------------------------------------------- */

/* Add to the word of a handle that is open; whether it was. */
static int enter(struct rp_handle *h, uint64_t user)
{
	uint64_t word = load(&h->word);

	do {
		if (h->process != process)
			return 0;
		/* What comes before the destruction may use it still. */
		if (word & SHUT &&
		    !(h->releasing && h->closer == this_thread()))
			return 0;
	} while (!__atomic_compare_exchange_n(&h->word, &word, word + user, 0,
					      __ATOMIC_SEQ_CST,
					      __ATOMIC_SEQ_CST));
	return 1;
}

static int is_busy(struct rp_handle *h)
{
	return (load(&h->word) & ~SHUT) || load(&h->posted) ||
	       __atomic_load_n(&h->windows, __ATOMIC_SEQ_CST);
}

static void put_off(struct rp_handle *h, char who)
{
	if (__atomic_exchange_n(&h->put_off, who, __ATOMIC_SEQ_CST))
		return;
	Py_INCREF((PyObject *)h);
	h->next = NULL;
	if (rp_thread()->last_put_off)
		rp_thread()->last_put_off->next = h;
	else
		rp_thread()->first_put_off = h;
	rp_thread()->last_put_off = h;
}

static void close_quietly(struct rp_handle *h);

/* A user is gone: if nobody else can reach the handle, its last user closes it. */
void rp_look_after(struct rp_handle *h)
{
	if (!__atomic_load_n(&h->abandoned, __ATOMIC_SEQ_CST) || exiting ||
	    !rp_is_open(h) || is_busy(h))
		return;
	if (rp_thread()->top)
		put_off(h, BY_FINALIZER);
	else
		close_quietly(h);
}

static void leave(struct rp_handle *h, uint64_t user)
{
	if (h->process != process)
		return;
	__atomic_sub_fetch(&h->word, user, __ATOMIC_SEQ_CST);
	rp_look_after(h);
}

int rp_is_open(const struct rp_handle *h)
{
	return h->process == process && !(load(&h->word) & SHUT);
}

int rp_in_verb(void)
{
	return rp_thread()->top != NULL;
}

static void push(struct rp_use *use, struct rp_handle *h)
{
	struct rp_thread *me = rp_thread();

	use->handle = h;
	use->below = me->top;
	me->top = use;
}

int rp_begin_use_shut(struct rp_thread *me, struct rp_handle *h, struct rp_use *use)
{
	(void)me;
	if (!enter(h, 1))
		return -1;
	push(use, h);
	return 0;
}

int rp_begin_use(struct rp_handle *h, struct rp_use *use)
{
	return rp_begin_use_by(rp_thread(), h, use);
}

static void pop(struct rp_use *use)
{
	struct rp_thread *me = rp_thread();

	me->top = use->below;
	if (!me->top && me->first_put_off && !me->draining)
		rp_close_put_off();
}

void rp_end_use(struct rp_use *use)
{
	rp_end_use_by(rp_thread(), use);
}

void rp_unname(struct rp_handle *h)
{
	if (h->process != process)
		return;
	RP_ADD(&h->posted, -1);
	rp_look_after(h);
}

/* ---- windows -------------------------------------------------------------- */

struct rp_bound {
	struct rp_handle *mr;
	struct rp_bound *next;
};

/* Let go of the regions that a window was bound to; may run any code of Python's. */
static void unbind(struct rp_bound *bound)
{
	while (bound) {
		struct rp_bound *next = bound->next;

		RP_ADD(&bound->mr->windows, -1);
		rp_look_after(bound->mr);
		Py_DECREF((PyObject *)bound->mr);
		PyMem_Free(bound);
		bound = next;
	}
}

void rp_bind(struct rp_handle *mw, struct rp_handle *mr, int sure)
{
	struct rp_bound *new = NULL, *old = NULL;

	if (!mw->cdata || mw->process != process)
		return;
	if (mr) {
		/* Where memory runs out it is held for ever. */
		new = PyMem_Malloc(sizeof(*new));
		RP_ADD(&mr->windows, 1);
		Py_INCREF((PyObject *)mr);
	}
	RP_BEGIN(mw);
	if (sure) {
		old = mw->bound;
		mw->bound = NULL;
	}
	if (new) {
		*new = (struct rp_bound){ mr, mw->bound };
		mw->bound = new;
	}
	RP_END();
	unbind(old);
}

void rp_raise_closed(struct rp_handle *h)
{
	if (is_foreign(h))
		PyErr_Format(python.closed,
			     "%S was opened by process %d; open the device "
			     "again", h, h->pid);
	else
		PyErr_Format(python.closed, "%S is closed", h);
}

/* ---- what provider functions return --------------------------------------- */

/* Read the errno that cffi has saved; another call of cffi's may change it. */
static int saved_errno(void)
{
	PyObject *number = PyObject_GetAttrString(python.ffi, "errno");
	long code = number ? PyLong_AsLong(number) : 0;

	Py_XDECREF(number);
	PyErr_Clear();
	return (int)code;
}

static void raise_failed(PyObject *function, int code)
{
	PyObject *nothing = PyObject_CallFunction(python.failed, "Oi",
						  function, code);

	if (nothing) {
		Py_DECREF(nothing);
		PyErr_SetString(PyExc_SystemError, "no exception was raised");
	}
}

/* Read where a cdata points to; 0, or -1 with an exception. */
static int read_address(PyObject *cdata, void **address)
{
	PyObject *cast = PyObject_CallFunctionObjArgs(python.cast,
						      python.number, cdata,
						      NULL);
	PyObject *number = cast ? PyNumber_Long(cast) : NULL;

	*address = number ? PyLong_AsVoidPtr(number) : NULL;
	Py_XDECREF(number);
	Py_XDECREF(cast);
	return number && !PyErr_Occurred() ? 0 : -1;
}

/* Whether a call that returns 0, an errno, its negative, or -1 with errno did well. */
static int succeeded(PyObject *function, PyObject *result)
{
	long code;

	if (!result)
		return 0;
	code = result == Py_None ? 0 : PyLong_AsLong(result);
	if (!code)
		return 1;
	if (!PyErr_Occurred())
		raise_failed(function,
			     code == -1 ? saved_errno() : (int)labs(code));
	return 0;
}

/* ---- making --------------------------------------------------------------- */

/* Leave the first `count` of a tuple of parents. */
static void leave_parents(PyObject *parents, Py_ssize_t count)
{
	for (Py_ssize_t i = 0; i < count; i++)
		leave((struct rp_handle *)PyTuple_GetItem(parents, i), CHILD);
}

/* Become a child of each; 0, or -1 with an exception. */
static int join_parents(PyObject *parents)
{
	Py_ssize_t count = PyTuple_Size(parents);

	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *parent = PyTuple_GetItem(parents, i);

		if (!rp_is_handle(parent))
			PyErr_SetString(PyExc_TypeError,
					"a parent is not a handle");
		else if (!enter((struct rp_handle *)parent, CHILD))
			rp_raise_closed((struct rp_handle *)parent);
		else
			continue;
		leave_parents(parents, i);
		return -1;
	}
	return 0;
}

/*
 * Call a function with what arguments stand for: a handle for its struct.  All
 * handles among them are in use meanwhile.  `uses` has room for MAX_ARGS.
 */
static PyObject *call(PyObject *function, PyObject *const *args,
		      Py_ssize_t nargs, struct rp_use *uses, int *used)
{
	PyObject *given, *result;

	*used = 0;
	if (nargs > MAX_ARGS) {
		PyErr_SetString(PyExc_TypeError, "too many arguments");
		return NULL;
	}
	given = PyTuple_New(nargs);
	if (!given)
		return NULL;
	for (Py_ssize_t i = 0; i < nargs; i++) {
		struct rp_handle *h = (struct rp_handle *)args[i];

		if (!rp_is_handle(args[i])) {
			PyTuple_SetItem(given, i, Py_NewRef(args[i]));
			continue;
		}
		if (rp_begin_use(h, &uses[*used])) {
			rp_raise_closed(h);
			Py_DECREF(given);
			return NULL;
		}
		++*used;
		PyTuple_SetItem(given, i, Py_NewRef(h->cdata));
	}
	result = PyObject_Call(function, given, NULL);
	Py_DECREF(given);
	return result;
}

static void end_uses(struct rp_use *uses, int used)
{
	while (used)
		rp_end_use(&uses[--used]);
}

/* Take what was made; 0, or -1 with an exception and nothing made. */
static int take_made(struct rp_handle *h, PyObject *create, PyObject *made,
		     PyObject *destroy)
{
	PyObject *undone;

	if (read_address(made, &h->address)) {
		PyObject *type, *value, *trace;

		PyErr_Fetch(&type, &value, &trace);
		undone = PyObject_CallFunctionObjArgs(destroy, made, NULL);
		Py_XDECREF(undone);
		PyErr_Restore(type, value, trace);
		return -1;
	}
	if (!h->address) {
		raise_failed(create, saved_errno());
		return -1;
	}
	return 0;
}

static int make(struct rp_handle *h, PyObject *create, PyObject *args,
		PyObject *destroy, PyObject *parents)
{
	struct rp_use uses[MAX_ARGS], own;
	PyObject *given[MAX_ARGS], *made;
	Py_ssize_t nargs = PyTuple_Size(args);
	int used = 0, failed;

	if (nargs > MAX_ARGS) {
		PyErr_SetString(PyExc_TypeError, "too many arguments");
		return -1;
	}
	for (Py_ssize_t i = 0; i < nargs; i++)
		given[i] = PyTuple_GetItem(args, i);
	if (join_parents(parents))
		return -1;
	push(&own, h);
	made = call(create, given, nargs, uses, &used);
	/* From here on no code of Python's runs before the handle has it. */
	failed = !made || take_made(h, create, made, destroy);
	if (!failed) {
		h->cdata = made;
		h->destroy = Py_NewRef(destroy);
		h->parents = Py_NewRef(parents);
		h->process = process;
		add_to_list(h);
		__atomic_and_fetch(&h->word, ~SHUT, __ATOMIC_SEQ_CST);
	}
	end_uses(uses, used);
	pop(&own);
	if (failed) {
		Py_XDECREF(made);
		leave_parents(parents, PyTuple_Size(parents));
	}
	return failed ? -1 : 0;
}

/*
 * _make(create, args, destroy, parents, keeps=None, access=0): call create
 * with args, and be what it returns, a child of each of the parents.
 */
static PyObject *handle_make(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "create", "args", "destroy", "parents",
				 "keeps", "access", NULL };
	struct rp_handle *h = (struct rp_handle *)self;
	PyObject *create, *values, *destroy, *parents, *keeps = NULL;
	unsigned int access = 0;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!OO!|OI", names,
					 &create, &PyTuple_Type, &values,
					 &destroy, &PyTuple_Type, &parents,
					 &keeps, &access))
		return NULL;
	if (__atomic_exchange_n(&h->made, 1, __ATOMIC_SEQ_CST)) {
		PyErr_Format(PyExc_RuntimeError,
			     "%S has been made; __init__ is not called again",
			     self);
		return NULL;
	}
	h->process = process;
	h->pid = (int)getpid();
	h->access = access;
	h->keeps = Py_XNewRef(keeps);
	if (make(h, create, values, destroy, parents)) {
		PyObject *type, *value, *trace;

		PyErr_Fetch(&type, &value, &trace);
		Py_CLEAR(h->keeps);
		h->made = 0;
		PyErr_Restore(type, value, trace);
		return NULL;
	}
	return Py_NewRef(h->cdata);
}

/* ---- using ---------------------------------------------------------------- */

/* _verb(function, *args): call it with this handle's struct and args. */
static PyObject *handle_verb(PyObject *self, PyObject *const *args,
			     Py_ssize_t nargs)
{
	struct rp_use uses[MAX_ARGS];
	PyObject *given[MAX_ARGS], *result;
	int used;

	if (nargs < 1 || nargs > MAX_ARGS) {
		PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
		return NULL;
	}
	given[0] = self;
	for (Py_ssize_t i = 1; i < nargs; i++)
		given[i] = args[i];
	result = call(args[0], given, nargs, uses, &used);
	end_uses(uses, used);
	return result;
}

/* _live(): the struct, or ClosedError. */
static PyObject *handle_live(PyObject *self, PyObject *unused)
{
	struct rp_handle *h = (struct rp_handle *)self;
	PyObject *cdata;

	(void)unused;
	if (!enter(h, 1)) {
		rp_raise_closed(h);
		return NULL;
	}
	cdata = Py_NewRef(h->cdata);
	leave(h, 1);
	return cdata;
}

static PyObject *get_handle(PyObject *self, void *unused)
{
	struct rp_handle *h = (struct rp_handle *)self;

	(void)unused;
	if (!enter(h, 1))
		Py_RETURN_NONE;
	PyObject *cdata = Py_NewRef(h->cdata);
	leave(h, 1);
	return cdata;
}

static int is_closed(struct rp_handle *h)
{
	return h->process != process ||
	       !__atomic_load_n(&h->cdata, __ATOMIC_SEQ_CST);
}

static PyObject *get_closed(PyObject *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(is_closed((struct rp_handle *)self));
}

static PyObject *get_parents(PyObject *self, void *unused)
{
	struct rp_handle *h = (struct rp_handle *)self;
	PyObject *parents;

	(void)unused;
	if (!enter(h, 1))
		return PyTuple_New(0);
	parents = Py_NewRef(h->parents);
	leave(h, 1);
	return parents;
}

/* ---- closing -------------------------------------------------------------- */

/* Call a method that may refuse; 0, or -1 with an exception. */
static int ask(struct rp_handle *h, const char *method)
{
	PyObject *done = PyObject_CallMethod((PyObject *)h, method, NULL);

	Py_XDECREF(done);
	return done ? 0 : -1;
}

struct pause {
	long us; /* of the next one */
	long left_us; /* of all, or -1 for no end */
};

/* Sleep a little, and look at signals; 0, -1 with an exception, or 1 where time is up. */
static int sleep_on(struct pause *pause)
{
	struct timespec time = { 0, pause->us * 1000 };

	if (pause->left_us >= 0 && (pause->left_us -= pause->us) < 0)
		return 1;
	Py_BEGIN_ALLOW_THREADS
	nanosleep(&time, NULL);
	Py_END_ALLOW_THREADS
	if (pause->us < LONGEST_PAUSE_US)
		pause->us *= 2;
	return PyErr_CheckSignals();
}

static void reopen(struct rp_handle *h)
{
	h->releasing = 0;
	__atomic_store_n(&h->closer, 0, __ATOMIC_SEQ_CST);
	__atomic_and_fetch(&h->word, ~SHUT, __ATOMIC_SEQ_CST);
}

/*
 * Let nobody begin to use it.  Returns 1; 0 where it is closed, or this thread
 * is closing it; -1 with an exception.
 */
static int shut(struct rp_handle *h, struct pause *pause)
{
	for (;;) {
		uint64_t word = load(&h->word);

		if (!(word & SHUT)) {
			if (CHILDREN(word)) {
				ask(h, "_refuse_children"); /* it raises */
				return -1;
			}
			if (!__atomic_compare_exchange_n(
				    &h->word, &word, word | SHUT, 0,
				    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
				continue;
			__atomic_store_n(&h->closer, this_thread(),
					 __ATOMIC_SEQ_CST);
			return 1;
		}
		if (is_closed(h) ||
		    __atomic_load_n(&h->closer, __ATOMIC_SEQ_CST) ==
			    this_thread())
			return 0;
		/* Another thread closes it: wait for what comes of that. */
		switch (sleep_on(pause)) {
		case -1:
			return -1;
		case 1:
			return 0;
		}
	}
}

/* All that comes before the destruction; 0, -1 with an exception, or 1 where time is up. */
static int release(struct rp_handle *h, struct pause *pause)
{
	/* Threads that wait are in the middle of a verb. */
	if (ask(h, "_wake"))
		return -1;
	while (VERBS(load(&h->word))) {
		int stopped = sleep_on(pause);

		if (stopped)
			return stopped;
	}
	h->releasing = 1;
	if (ask(h, "_release"))
		return -1;
	if (load(&h->posted)) {
		ask(h, "_refuse_posted"); /* it raises */
		return -1;
	}
	/* A handler that runs in there may have used it. */
	h->releasing = 0;
	return 0;
}

/* Call _forget() until it has come to its end; the first exception of an interrupt remains. */
static int finish(struct rp_handle *h)
{
	PyObject *type = NULL, *value = NULL, *trace = NULL;

	for (int i = 0; h->unfinished && i < MOST_INTERRUPTS; i++) {
		if (!ask(h, "_forget"))
			h->unfinished = 0;
		else if (type)
			PyErr_Clear();
		else
			PyErr_Fetch(&type, &value, &trace);
	}
	if (!type)
		return 0;
	PyErr_Restore(type, value, trace);
	return -1;
}

/* What a handle holds while it is open. */
struct held {
	PyObject *cdata, *destroy, *parents, *keeps;
	struct rp_bound *bound;
};

/* Note that the struct is gone.  Runs no code of Python's. */
static void note_destroyed(struct rp_handle *h, struct held *held)
{
	held->destroy = h->destroy;
	held->parents = h->parents;
	held->keeps = h->keeps;
	held->bound = h->bound;
	h->bound = NULL;
	held->cdata = h->cdata;
	h->address = NULL;
	h->destroy = h->parents = h->keeps = NULL;
	h->unfinished = 1;
	__atomic_store_n(&h->cdata, NULL, __ATOMIC_SEQ_CST);
	__atomic_store_n(&h->closer, 0, __ATOMIC_SEQ_CST);
	remove_from_list(h);
}

/* Leave the parents, which _forget() may have used, and drop all that was held. */
static void let_go(struct held *held)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace);
	leave_parents(held->parents, PyTuple_Size(held->parents));
	unbind(held->bound);
	Py_XDECREF(held->keeps);
	Py_DECREF(held->cdata);
	Py_DECREF(held->destroy);
	Py_DECREF(held->parents);
	PyErr_Restore(type, value, trace);
}

static int destroy(struct rp_handle *h, struct held *held)
{
	struct rp_use use;
	PyObject *result;
	int done;

	push(&use, h);
	result = PyObject_CallFunctionObjArgs(h->destroy, h->cdata, NULL);
	done = succeeded(h->destroy, result);
	/* From a call that did well to here no code of Python's has run. */
	if (done)
		note_destroyed(h, held);
	Py_XDECREF(result);
	pop(&use);
	return done ? 0 : -1;
}

/* Close it, now; 0, or -1 with an exception. */
static int close_now(struct rp_handle *h, char who)
{
	struct pause pause = { 1, who == AT_EXIT ? WAIT_AT_EXIT_MS * 1000L :
						   -1 };
	struct held held;
	int stopped = shut(h, &pause);

	if (stopped < 0)
		return -1;
	if (!stopped)
		return finish(h);
	stopped = release(h, &pause);
	if (!stopped && !destroy(h, &held)) {
		stopped = finish(h);
		let_go(&held);
		return stopped;
	}
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace);
	h->releasing = 1;
	if (ask(h, "_restore"))
		PyErr_WriteUnraisable((PyObject *)h);
	reopen(h);
	PyErr_Restore(type, value, trace);
	return stopped > 0 ? 0 : -1;
}

/* Say what nobody can be told by an exception; whether it was a Ctrl-C, to be raised again. */
static int report(struct rp_handle *h)
{
	if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
		PyErr_Clear();
		return 1;
	}
	PyErr_WriteUnraisable((PyObject *)h);
	return 0;
}

/* Keep what the device keeps for the life of the process, with its memory and its parents. */
static void keep(struct rp_handle *h)
{
	PyObject *type, *value, *trace, *said;

	PyErr_Fetch(&type, &value, &trace);
	if (!h->kept) {
		h->kept = 1;
		Py_INCREF((PyObject *)h);
		said = PyObject_CallMethod((PyObject *)h, "_warn_kept", "O",
					   value ? value : Py_None);
		if (!said)
			PyErr_WriteUnraisable((PyObject *)h);
		Py_XDECREF(said);
	}
	Py_XDECREF(type);
	Py_XDECREF(value);
	Py_XDECREF(trace);
}

/* Close what nobody can reach. */
static void close_quietly(struct rp_handle *h)
{
	PyObject *type, *value, *trace;
	int interrupted = 0, failed = 1;

	PyErr_Fetch(&type, &value, &trace);
	Py_INCREF((PyObject *)h);
	for (int i = 0; failed && i < MOST_INTERRUPTS; i++) {
		failed = close_now(h, BY_FINALIZER);
		if (failed && PyErr_ExceptionMatches(python.error))
			break;
		if (failed)
			interrupted |= report(h);
	}
	if (failed && h->cdata) {
		keep(h);
	} else if (h->kept && !h->cdata) {
		h->kept = 0;
		Py_DECREF((PyObject *)h);
	}
	PyErr_Clear();
	if (interrupted)
		PyErr_SetInterrupt();
	Py_DECREF((PyObject *)h);
	PyErr_Restore(type, value, trace);
}

/* Close what this thread was to close while it was in a verb. */
void rp_close_put_off(void)
{
	PyObject *type, *value, *trace;

	int interrupted = 0;

	PyErr_Fetch(&type, &value, &trace);
	rp_thread()->draining = 1;
	while (rp_thread()->first_put_off) {
		struct rp_handle *h = rp_thread()->first_put_off;
		char who;

		rp_thread()->first_put_off = h->next;
		if (!rp_thread()->first_put_off)
			rp_thread()->last_put_off = NULL;
		who = __atomic_exchange_n(&h->put_off, NOBODY,
					  __ATOMIC_SEQ_CST);
		if (is_foreign(h) || !(h->cdata || h->unfinished))
			;
		else if (who == BY_CALLER && close_now(h, BY_CALLER))
			interrupted |= report(h);
		else if (who == BY_FINALIZER && !exiting && !is_busy(h))
			close_quietly(h);
		Py_DECREF((PyObject *)h);
	}
	rp_thread()->draining = 0;
	if (interrupted)
		PyErr_SetInterrupt();
	PyErr_Restore(type, value, trace);
}

/* Whether there is nothing to close here. */
static int is_done(struct rp_handle *h)
{
	return h->process != process || !(h->cdata || h->unfinished);
}

static PyObject *close_by(PyObject *self, char who)
{
	struct rp_handle *h = (struct rp_handle *)self;
	int failed = 0;

	Py_INCREF((PyObject *)h);
	if (is_done(h))
		;
	else if (rp_thread()->top)
		put_off(h, who);
	else
		failed = close_now(h, who);
	Py_DECREF((PyObject *)h);
	if (failed)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *handle_close(PyObject *self, PyObject *unused)
{
	(void)unused;
	return close_by(self, BY_CALLER);
}

/* _close_at_exit(): as close(), and never wait for long. */
static PyObject *handle_close_at_exit(PyObject *self, PyObject *unused)
{
	(void)unused;
	return close_by(self, AT_EXIT);
}

/* _bind(mr): a window is bound to a region, or with None to nothing. */
static PyObject *handle_bind(PyObject *self, PyObject *mr)
{
	if (mr != Py_None && !rp_is_handle(mr)) {
		PyErr_SetString(PyExc_TypeError, "it is not a handle");
		return NULL;
	}
	rp_bind((struct rp_handle *)self, mr == Py_None ? NULL : (struct rp_handle *)mr, 1);
	Py_RETURN_NONE;
}

/* _abandon(): the last user closes it; the caller has made one. */
static PyObject *handle_abandon(PyObject *self, PyObject *unused)
{
	(void)unused;
	__atomic_store_n(&((struct rp_handle *)self)->abandoned, 1,
			 __ATOMIC_SEQ_CST);
	Py_RETURN_NONE;
}

/* What a hook does where a class has nothing to do. */
static PyObject *do_nothing(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	Py_RETURN_NONE;
}

/* ---- the type ------------------------------------------------------------- */

static PyObject *handle_new(PyTypeObject *type, PyObject *args,
			    PyObject *kwargs)
{
	struct rp_handle *h;

	(void)args;
	(void)kwargs;
	h = (struct rp_handle *)PyType_GenericAlloc(type, 0);
	if (h)
		h->word = SHUT;
	return (PyObject *)h;
}

static int handle_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct rp_handle *h = (struct rp_handle *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(h->cdata);
	Py_VISIT(h->destroy);
	Py_VISIT(h->parents);
	Py_VISIT(h->keeps);
	for (struct rp_bound *b = h->bound; b; b = b->next)
		Py_VISIT((PyObject *)b->mr);
	return 0;
}

static void handle_finalize(PyObject *self)
{
	struct rp_handle *h = (struct rp_handle *)self;

	if (exiting || !h->made || is_done(h))
		return;
	__atomic_store_n(&h->abandoned, 1, __ATOMIC_SEQ_CST);
	if (h->cdata && is_busy(h))
		return;
	if (rp_thread()->top)
		put_off(h, BY_FINALIZER);
	else
		close_quietly(h);
}

static void handle_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	struct rp_handle *h = (struct rp_handle *)self;
	freefunc release_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);

	PyObject_GC_UnTrack(self);
	if (h->cdata) {
		remove_from_list(h);
		if (h->process == process) {
			/*
			 * The interpreter ends, or a subclass has a finalizer
			 * of its own: the device has it still, so what it
			 * stands on must stay.
			 */
			h->cdata = h->destroy = h->parents = NULL;
			h->keeps = NULL;
			h->bound = NULL;
		}
	}
	Py_XDECREF(h->cdata);
	Py_XDECREF(h->destroy);
	Py_XDECREF(h->parents);
	Py_XDECREF(h->keeps);
	unbind(h->bound);
	release_memory(self);
	Py_DECREF(type);
}

static PyMethodDef handle_methods[] = {
	{ "_make", (PyCFunction)(void (*)(void))handle_make,
	  METH_VARARGS | METH_KEYWORDS, NULL },
	{ "_verb", (PyCFunction)(void (*)(void))handle_verb, METH_FASTCALL,
	  NULL },
	{ "_live", handle_live, METH_NOARGS,
	  "Return the struct, or raise ClosedError." },
	{ "close", handle_close, METH_NOARGS,
	  "Give the resource back; do nothing if that has been done.\n\n"
	  "It waits for the verbs that other threads are in the middle of. "
	  "In the middle of\na verb of this thread (a signal handler, a "
	  "finalizer) it is put off until that\nhas ended.  In the child of "
	  "a fork it does nothing.\n\n"
	  "Raises:\n"
	  "    InUseError: others that depend on it are open; it stays open "
	  "too.\n"
	  "    VerbsError: the device refused; it stays open too.\n" },
	{ "_close_at_exit", handle_close_at_exit, METH_NOARGS, NULL },
	{ "_abandon", handle_abandon, METH_NOARGS, NULL },
	{ "_wake", do_nothing, METH_NOARGS, NULL },
	{ "_bind", handle_bind, METH_O, NULL },
	{ "_release", do_nothing, METH_NOARGS, NULL },
	{ "_restore", do_nothing, METH_NOARGS, NULL },
	{ "_forget", do_nothing, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef handle_getset[] = {
	{ "_handle", get_handle, NULL, NULL, NULL },
	{ "_parents", get_parents, NULL, NULL, NULL },
	{ "closed", get_closed, NULL, "Whether it has been closed.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMemberDef handle_members[] = {
	{ "_abandoned", T_BOOL, offsetof(struct rp_handle, abandoned),
	  READONLY, NULL },
	{ "_pid", T_INT, offsetof(struct rp_handle, pid), READONLY, NULL },
	{ "_posted", T_ULONGLONG, offsetof(struct rp_handle, posted),
	  READONLY, NULL },
	{ NULL, 0, 0, 0, NULL },
};

static PyType_Slot handle_slots[] = {
	{ Py_tp_new, handle_new },
	{ Py_tp_traverse, handle_traverse },
	{ Py_tp_finalize, handle_finalize },
	{ Py_tp_dealloc, handle_dealloc },
	{ Py_tp_methods, handle_methods },
	{ Py_tp_getset, handle_getset },
	{ Py_tp_members, handle_members },
	{ 0, NULL },
};

static PyType_Spec handle_spec = {
	.name = "rdmapost._verbs.Handle",
	.basicsize = sizeof(struct rp_handle),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = handle_slots,
};

/* ---- for Python ----------------------------------------------------------- */

/* describe_handles(ClosedError, RdmaError, failed, ffi, uintptr_t) */
static PyObject *describe_handles(PyObject *self, PyObject *args)
{
	(void)self;
	if (!PyArg_ParseTuple(args, "OOOOO", &python.closed, &python.error,
			      &python.failed, &python.ffi, &python.number))
		return NULL;
	python.cast = PyObject_GetAttrString(python.ffi, "cast");
	if (!python.cast)
		return NULL;
	Py_INCREF(python.closed);
	Py_INCREF(python.error);
	Py_INCREF(python.failed);
	Py_INCREF(python.ffi);
	Py_INCREF(python.number);
	Py_RETURN_NONE;
}

/* open_handles(): those of this process that are open, the newest first. */
static PyObject *open_handles(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	return list_open(NULL);
}

/* handle_at(address): the open handle whose struct is there, or None. */
static PyObject *handle_at(PyObject *self, PyObject *address)
{
	void *pointer = PyLong_AsVoidPtr(address);
	PyObject *list, *found;

	(void)self;
	if (!pointer) {
		if (PyErr_Occurred())
			return NULL;
		Py_RETURN_NONE;
	}
	list = list_open(pointer);
	if (!list)
		return NULL;
	found = PyList_Size(list) ? PyList_GetItem(list, 0) : Py_None;
	Py_INCREF(found);
	Py_DECREF(list);
	return found;
}

/* end_handles(): finalizers do nothing any more. */
static PyObject *end_handles(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	exiting = 1;
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "describe_handles", describe_handles, METH_VARARGS, NULL },
	{ "open_handles", open_handles, METH_NOARGS, NULL },
	{ "handle_at", handle_at, METH_O, NULL },
	{ "end_handles", end_handles, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_handle(PyObject *module)
{
	static int watches_forks;

	if (!watches_forks) {
		pthread_atfork(NULL, NULL, after_fork);
		watches_forks = 1;
	}
	rp_handle_type = PyType_FromSpec(&handle_spec); /* held for ever */
	if (!rp_handle_type ||
	    PyModule_AddObjectRef(module, "Handle", rp_handle_type))
		return -1;
	return PyModule_AddFunctions(module, functions);
}
