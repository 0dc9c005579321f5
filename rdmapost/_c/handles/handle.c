/* A handle's lifetime (handle.h). */
#include "handles/handle.h"

#include <structmember.h>
#include <unistd.h>

#include "attribute_offsets.h"
#include "handles/exceptions.h"
#include "parts.h"

#define SHUT RP_SHUT
#define CHILD (1ull << 32)
#define VERBS(word) ((word) & UINT32_MAX)
#define CHILDREN(word) (((word) & ~SHUT) >> 32)

enum {
	MAX_ARGS = 8,
	LONGEST_PAUSE_US = 1000,
	WAIT_AT_EXIT_US = 1000000,
	RETRIES_NS = 500000000, /* how long a close handed to the main thread is retried */
	HELD_NS = 500000000, /* how long a queue pair waits for its windows; see hold_back() */
};

/* Who deferred a close. */
enum { NOBODY, BY_CALLER, BY_FINALIZER };

/*
 * A handle's state. BEGUN: its constructor is preparing the arguments of _make(). DESTROYED: the
 * struct is gone, but _forget() has not succeeded yet; the next close() calls it again.
 */
enum { NEW, BEGUN, MAKING, OPEN, DESTROYED, GONE };

PyObject *rp_handle_type;
int rp_exiting;
PyObject *(*rp_progress)(void);

/* Provided by rdmapost/resources/resource.py; never released. */
static struct {
	PyObject *failed; /* called with a function and an errno: raises */
	PyObject *ffi;
	PyObject *to_number; /* converts a cffi pointer to a number */
	PyObject *open; /* a dict of weak references to open handles */
	PyObject *type_of; /* returns a cdata's type */
	PyObject *structs; /* a dict of each class's struct type */
} python;

static uintptr_t this_thread(void)
{
	return (uintptr_t)rp_thread();
}

static int state_of(const struct rp_handle *h)
{
	return __atomic_load_n(&h->state, __ATOMIC_SEQ_CST);
}

static void set_state(struct rp_handle *h, char state)
{
	__atomic_store_n(&h->state, state, __ATOMIC_SEQ_CST);
}

/* Whether there is nothing to close in this process. */
static int is_done(const struct rp_handle *h)
{
	int state = state_of(h);

	return h->process != rp_process || !(state == OPEN || state == DESTROYED);
}

static uint64_t load(const uint64_t *word)
{
	return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

/* A saved exception. */
struct error {
	PyObject *type, *value, *trace;
};

static struct error save_error(void)
{
	struct error error;

	PyErr_Fetch(&error.type, &error.value, &error.trace);
	return error;
}

static void restore_error(struct error error)
{
	PyErr_Restore(error.type, error.value, error.trace);
}

/* Set a handle's value in the dict of open handles, or remove it if `value` is NULL; 0, or -1. */
static int list_as(struct rp_handle *h, PyObject *value)
{
	PyObject *key = PyLong_FromVoidPtr(h);
	int failed = !key || (value ? PyDict_SetItem(python.open, key, value) :
				      PyDict_DelItem(python.open, key));

	Py_XDECREF(key);
	return failed ? -1 : 0;
}

/* Remove a handle from the dict of open handles; runs no Python code. */
static void unlist(struct rp_handle *h)
{
	struct error error = save_error();

	/* If memory runs out, the entry stays: readers skip closed handles. */
	if (list_as(h, NULL))
		PyErr_Clear();
	restore_error(error);
}

/*
 * List an unreachable handle for close_dropped(): the collector has cleared its weak reference.
 * Returns whether it is listed.
 */
static int list_again(struct rp_handle *h)
{
	struct error error = save_error();
	PyObject *listed = PyWeakref_NewRef((PyObject *)h, NULL);
	int done = listed && !list_as(h, listed);

	PyErr_Clear();
	Py_XDECREF(listed);
	restore_error(error);
	return done;
}

/* ---- users ---------------------------------------------------------------- */

/* Whether this thread is in the middle of closing a handle. */
static int is_closer(const struct rp_handle *h)
{
	return __atomic_load_n(&h->closer, __ATOMIC_SEQ_CST) == this_thread();
}

/* Add a user to an open handle's `word`. Returns whether the handle was open. */
static int enter(struct rp_handle *h, uint64_t user)
{
	uint64_t word = load(&h->word);

	do {
		if (h->process != rp_process)
			return 0;
		/* Until the struct is destroyed, the closer may use it but create no children. */
		if (word & SHUT &&
		    (user == CHILD || !h->releasing || !is_closer(h)))
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

static void close_abandoned(struct rp_handle *h)
{
	if (rp_exiting == RP_CLOSED_ALL || is_done(h) ||
	    (state_of(h) == OPEN && !rp_is_open(h) && !h->spoiled) || is_busy(h))
		return;
	if (rp_thread()->top)
		put_off(h, BY_FINALIZER);
	else
		close_quietly(h);
}

/* A user has left: the last user of an unreachable handle closes it. */
void rp_user_left(struct rp_handle *h)
{
	if (__atomic_load_n(&h->abandoned, __ATOMIC_SEQ_CST) && !RP_LOAD(&h->held_since))
		close_abandoned(h);
}

static void leave(struct rp_handle *h, uint64_t user)
{
	if (h->process != rp_process)
		return;
	__atomic_sub_fetch(&h->word, user, __ATOMIC_SEQ_CST);
	rp_user_left(h);
}

int rp_is_open(const struct rp_handle *h)
{
	return h->process == rp_process && !(load(&h->word) & SHUT);
}

int rp_in_verb(void)
{
	return rp_thread()->top || rp_thread()->making;
}

int rp_begin_use_shut(struct rp_handle *h, struct rp_use *use)
{
	if (!enter(h, 1))
		return -1;
	rp_push_use(rp_thread(), h, use);
	return 0;
}

int rp_begin_use(struct rp_handle *h, struct rp_use *use)
{
	return rp_begin_use_by(rp_thread(), h, use);
}

void rp_end_use(struct rp_use *use)
{
	rp_end_use_by(rp_thread(), use);
}

void rp_unpin(struct rp_handle *h)
{
	RP_ADD(&h->posted, -1);
	if (h->process == rp_process)
		rp_user_left(h);
}

/* ---- windows -------------------------------------------------------------- */

/*
 * A region that a window may be bound to. `bind.serial` (taken when the bind was posted) and `done`
 * (when its completion was seen) come from one counter.
 */
struct rp_bound {
	struct rp_handle *mr;
	struct rp_bound *next;
	struct rp_bind bind;
	uint64_t done;
	int sure;
};

uint64_t rp_count_bind(void)
{
	static uint64_t count;

	return __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED);
}

/*
 * A window of type 2 is bound and invalidated alternately, so the first invalidation seen for a key
 * ends the first bind under that key, whatever was posted meanwhile. Binds through several queue
 * pairs may be executed in any order, though. So once a bind is posted through another queue pair
 * before the invalidations of all earlier binds are seen, invalidations of that key no longer end
 * any bind. A window's `keeps` has a struct key_counts for each low byte of its keys; a window of
 * type 1 has none.
 */
struct key_counts {
	uint64_t word; /* high half: binds posted; low half: invalidations seen, at most as many */
	const void *binder; /* the last bind's, or SEVERAL */
};

enum { KEYS = 256 };
static const char SEVERAL[1];

static struct key_counts *counts_of_key(PyObject *counts, unsigned char key)
{
	if (!counts || !PyBytes_CheckExact(counts) ||
	    PyBytes_Size(counts) != (Py_ssize_t)(KEYS * sizeof(struct key_counts)))
		return NULL;
	return (struct key_counts *)(void *)PyBytes_AsString(counts) + key;
}

static uint64_t *word_of_key(PyObject *counts, unsigned char key)
{
	struct key_counts *found = counts_of_key(counts, key);

	return found ? &found->word : NULL;
}

uint32_t rp_number_bind(struct rp_handle *mw, unsigned char key, const struct rp_binder *binder)
{
	struct key_counts *counts = counts_of_key(mw->keeps, key);
	uint64_t old;

	if (!counts)
		return 0;
	old = RP_LOAD(&counts->word);
	if (RP_LOAD(&counts->binder) != binder && (uint32_t)old != (uint32_t)(old >> 32))
		RP_STORE(&counts->binder, SEVERAL);
	if (RP_LOAD(&counts->binder) != SEVERAL)
		RP_STORE(&counts->binder, binder);
	return (uint32_t)(RP_ADD(&counts->word, 1ull << 32) >> 32);
}

void rp_take_back_bind(struct rp_handle *mw, unsigned char key, uint32_t number)
{
	uint64_t *word = word_of_key(mw->keeps, key), old = word ? RP_LOAD(word) : 0;

	/* If another bind was posted since, the window counts as bound for longer than it is. */
	while (word && (uint32_t)(old >> 32) == number && (uint32_t)old != number &&
	       !rp_swap_word(word, &old, old - (1ull << 32)))
		;
}

void rp_count_invalidation(PyObject *counts, unsigned char key)
{
	uint64_t *word = word_of_key(counts, key), old = word ? RP_LOAD(word) : 0;

	while (word && (uint32_t)old != (uint32_t)(old >> 32) &&
	       !rp_swap_word(word, &old, (old & ~(uint64_t)UINT32_MAX) | (uint32_t)(old + 1)))
		;
}

static int is_invalidated(struct rp_handle *mw, const struct rp_bind *bind)
{
	struct key_counts *counts = counts_of_key(mw->keeps, bind->key);

	return counts && bind->number && RP_LOAD(&counts->binder) != SEVERAL &&
	       (int32_t)((uint32_t)RP_LOAD(&counts->word) - bind->number) >= 0;
}

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

/*
 * A device may take minutes to destroy a queue pair through which a window is bound, and the window
 * may be in the same garbage cycle. So an unreachable queue pair waits here until its windows are
 * closed, for HELD_NS at most; the end of each verb checks. The list holds references.
 */
struct rp_handle *rp_held_back;

/* Put a handle at the head of a list, whose links are `next`. */
static void push(struct rp_handle **list, struct rp_handle *h, struct rp_handle **next)
{
	*next = RP_LOAD(list);
	while (!__atomic_compare_exchange_n(list, next, h, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		;
}

static void push_held_back(struct rp_handle *h)
{
	push(&rp_held_back, h, &h->behind);
}

static int binds_windows(struct rp_handle *h)
{
	struct rp_binder *binder = RP_LOAD(&h->binder);

	return binder && RP_LOAD(&binder->windows);
}

/* Hold back an unreachable queue pair if necessary; returns whether it is held back now. */
static int hold_back(struct rp_handle *h)
{
	if (!binds_windows(h) || is_done(h) || rp_exiting || RP_LOAD(&h->held_since) ||
	    !list_again(h))
		return 0;
	RP_STORE(&h->held_since, rp_now_ns());
	push_held_back((struct rp_handle *)Py_NewRef((PyObject *)h));
	return 1;
}

/*
 * Close the queue pairs that need not wait any longer; may run any Python code. A queue pair stays
 * listed while it is being closed, because the close may be interrupted.
 */
static void close_held_back(void)
{
	struct rp_handle *h = __atomic_exchange_n(&rp_held_back, NULL, __ATOMIC_SEQ_CST), *behind;
	int64_t now = h ? rp_now_ns() : 0;

	for (; h; h = behind) {
		behind = h->behind;
		if (h->process == rp_process && !is_done(h) &&
		    (!rp_is_open(h) ||
		     (binds_windows(h) && now - RP_LOAD(&h->held_since) < HELD_NS))) {
			push_held_back(h);
			continue;
		}
		RP_STORE(&h->held_since, 0);
		close_abandoned(h);
		Py_DECREF((PyObject *)h);
	}
}

/* Release the regions that a window was bound to; may run any Python code. */
static void unbind(struct rp_bound *bound)
{
	while (bound) {
		struct rp_bound *next = bound->next;

		RP_ADD(&bound->mr->windows, -1);
		RP_ADD(&bound->bind.binder->windows, -1);
		rp_user_left(bound->mr);
		Py_DECREF((PyObject *)bound->mr);
		rp_drop_binder(bound->bind.binder);
		PyMem_Free(bound);
		bound = next;
	}
}

/* Whether a region was certainly bound before a bind. */
static int precedes(const struct rp_bound *bound, const struct rp_bind *bind)
{
	return bound->done < bind->serial ||
	       (bound->bind.binder == bind->binder && bound->bind.serial < bind->serial);
}

void rp_note_bound(struct rp_handle *mw, struct rp_handle *mr, int sure, struct rp_bind bind)
{
	struct rp_bound *new = NULL, *old = NULL;
	int late = 0;

	if (state_of(mw) != OPEN || mw->process != rp_process)
		return;
	if (mr) {
		/* If memory runs out, the region is never released. */
		new = PyMem_Malloc(sizeof(*new));
		RP_ADD(&mr->windows, 1);
		RP_ADD(&bind.binder->windows, 1);
		Py_INCREF((PyObject *)mr);
		RP_ADD(&bind.binder->users, 1);
	}
	RP_BEGIN(mw);
	for (struct rp_bound *b, **at = &mw->bound; (b = *at);) {
		late |= b->sure && b->bind.binder == bind.binder && b->bind.serial > bind.serial;
		if (sure && precedes(b, &bind)) {
			*at = b->next;
			b->next = old;
			old = b;
		} else {
			at = &b->next;
		}
	}
	if (new) {
		struct rp_bound **list = late ? &old : &mw->bound;

		*new = (struct rp_bound){ mr, *list, bind, rp_count_bind(), sure };
		*list = new;
	}
	RP_END();
	unbind(old);
}

/*
 * _unbind_invalidated(): release the regions that a window is no longer bound to because its key
 * was invalidated. Returns whether there were any.
 */
static PyObject *handle_unbind_invalidated(PyObject *self, PyObject *unused)
{
	struct rp_handle *h = (struct rp_handle *)self;
	struct rp_bound *old = NULL;
	int found;

	(void)unused;
	RP_BEGIN(h);
	for (struct rp_bound *b, **at = &h->bound; (b = *at);) {
		if (is_invalidated(h, &b->bind)) {
			*at = b->next;
			b->next = old;
			old = b;
		} else {
			at = &b->next;
		}
	}
	RP_END();
	found = old != NULL;
	unbind(old);
	return PyBool_FromLong(found);
}

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

/* ---- provider functions' results ------------------------------------------ */

/* Raise a failed call's error: `code` is an errno, its negative, or -1 with cffi's saved errno. */
static void raise_failed(PyObject *function, long code)
{
	/* Read errno first: another cffi call may change it. */
	PyObject *number = code == -1 ? PyObject_GetAttrString(python.ffi, "errno") :
					PyLong_FromLong(labs(code));

	if (number)
		Py_XDECREF(PyObject_CallFunctionObjArgs(python.failed, function, number, NULL));
	Py_XDECREF(number);
}

/* Whether a call succeeded, by its result: 0, an errno, a negative errno, or -1 with errno set. */
static int succeeded(PyObject *function, PyObject *result)
{
	long code;

	if (!result)
		return 0;
	code = result == Py_None ? 0 : PyLong_AsLong(result);
	if (!code)
		return 1;
	if (!PyErr_Occurred())
		raise_failed(function, code);
	return 0;
}

/* ---- creating ------------------------------------------------------------- */

/* Stop being a child of the first `count` parents. */
static void leave_parents(PyObject *parents, Py_ssize_t count)
{
	for (Py_ssize_t i = 0; i < count; i++)
		leave((struct rp_handle *)PyTuple_GetItem(parents, i), CHILD);
}

static void raise_ending(struct rp_handle *parent)
{
	PyErr_Format(rp_errors.closed, "%S is being closed", parent);
}

/* Become a child of each parent; 0, or -1 with an exception. */
static int join_parents(PyObject *parents)
{
	Py_ssize_t count = PyTuple_Size(parents);

	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *parent = PyTuple_GetItem(parents, i);

		if (!rp_is_handle(parent))
			PyErr_SetString(PyExc_TypeError, "a parent is not a handle");
		else if (RP_LOAD(&((struct rp_handle *)parent)->emptied))
			raise_ending((struct rp_handle *)parent);
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
 * Call a function with each handle argument replaced by its struct. The handles
 * stay in use until the caller ends `uses`, which has room for MAX_ARGS. `self`,
 * unless NULL, replaces the first argument.
 */
static PyObject *call(PyObject *function, PyObject *self, PyObject *args, struct rp_use *uses,
		      int *used)
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
			/* May run any Python code, which could find an incomplete tuple. */
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

static void end_uses(struct rp_use *uses, int used)
{
	while (used)
		rp_end_use(&uses[--used]);
}

/*
 * Check that a new struct has the type required by the handle's class and each base class, because
 * the device receives it as that type. Runs no Python code; 0, or -1 with an exception.
 */
static int check_struct(const struct rp_handle *h, PyObject *made)
{
	PyObject *items = PyDict_Items(python.structs);
	PyObject *type = items ? PyObject_CallFunctionObjArgs(python.type_of, made, NULL) : NULL;
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

/* The interpreter is exiting: leave the handle open, but admit no users. */
static void give_up(struct rp_handle *h)
{
	__atomic_or_fetch(&h->word, SHUT, __ATOMIC_SEQ_CST);
}

/* Keep a memory region's keys as C numbers, because creating Python ints takes memory. */
static void read_keys(struct rp_handle *h)
{
	const struct ibv_mr *mr = h->form ? h->address : NULL;

	if (mr) {
		RP_STORE(&h->lkey, mr->lkey);
		RP_STORE(&h->rkey, mr->rkey);
	}
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
			raise_failed(create, -1);
		return -1;
	}
	h->cdata = Py_NewRef(made);
	cast = PyObject_CallFunctionObjArgs(python.to_number, made, NULL);
	number = cast ? PyNumber_Long(cast) : NULL;
	if (number && !check_struct(h, made))
		h->address = PyLong_AsVoidPtr(number);
	Py_XDECREF(number);
	Py_XDECREF(cast);
	failed = !h->address;
	if (failed)
		h->spoiled = 1;
	else {
		read_keys(h);
		__atomic_and_fetch(&h->word, ~SHUT, __ATOMIC_SEQ_CST);
	}
	/* Last: from here on any thread may close it. */
	set_state(h, OPEN);
	if (failed)
		return -1;
	if (rp_exiting == RP_CLOSED_ALL)
		give_up(h);
	return 0;
}

/*
 * Release every reference that a handle holds; while the handle is DESTROYED, keep those that
 * _forget() needs. The handle stays a child of its parents.
 */
static void drop_held(struct rp_handle *h, char state)
{
	PyObject *held[] = { h->cdata, h->destroy, h->parents, h->keeps, NULL, NULL };
	struct error error = save_error();
	struct rp_use use;
	struct rp_bound *bound;

	RP_BEGIN(h);
	bound = h->bound;
	h->bound = NULL;
	h->cdata = h->destroy = h->parents = h->keeps = NULL;
	if (state != DESTROYED) {
		held[4] = h->form;
		held[5] = h->replaced;
		h->form = h->replaced = NULL;
	}
	RP_END();
	set_state(h, state);
	/* Handles that this leaves unreferenced are closed when the use is popped. */
	rp_push_use(rp_thread(), h, &use);
	unbind(bound);
	for (size_t i = 0; i < sizeof(held) / sizeof(held[0]); i++)
		Py_XDECREF(held[i]);
	rp_pop_use(rp_thread(), &use);
	restore_error(error);
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
	if (join_parents(h->parents))
		return NULL;
	rp_push_use(rp_thread(), h, &own);
	listed = PyWeakref_NewRef((PyObject *)h, NULL);
	if (listed && !list_as(h, listed)) {
		made = call(create, NULL, args, uses, &used);
		/* No Python code runs from here until the handle owns the struct. */
		if (made && take_made(h, create, made))
			Py_CLEAR(made);
		*owner = h->cdata != NULL;
		if (!*owner)
			unlist(h);
	}
	Py_XDECREF(listed);
	end_uses(uses, used);
	rp_pop_use(rp_thread(), &own);
	if (!*owner)
		leave_parents(h->parents, PyTuple_Size(h->parents));
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

static void ask_main(void);

/* Whether a parent is about to be closed: by close_all(), or once this, its only child, has gone. */
static int is_ending(const struct rp_handle *parent, PyObject *parents)
{
	uint64_t count = 0;

	for (Py_ssize_t i = 0; i < PyTuple_Size(parents); i++)
		count += PyTuple_GetItem(parents, i) == (PyObject *)parent;
	return RP_LOAD(&parent->emptied) ||
	       (RP_LOAD(&parent->put_off) == BY_CALLER &&
		CHILDREN(load(&parent->word)) == count);
}

/* Return a new reference to a handle member's current value, or NULL (no exception). */
static PyObject *get_now(PyObject *self, PyObject *const *member)
{
	PyObject *value;

	RP_BEGIN(self);
	value = Py_XNewRef(*member);
	RP_END();
	return value;
}

/* Raise ClosedError if a parent of a new handle is about to be closed; 0, or -1. */
static int refuse_ending_parent(struct rp_handle *h)
{
	PyObject *parents = get_now((PyObject *)h, &h->parents);
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
 * The constructor has failed. If it created no struct, another constructor may begin. If it did,
 * close the handle, because a traceback may keep it alive for a long time. If that fails, list the
 * handle, so that the error for closing a parent names it.
 */
static void undo_making(struct rp_handle *h)
{
	uintptr_t maker = __atomic_exchange_n(&h->maker, 0, __ATOMIC_SEQ_CST);

	if ((maker == this_thread() && change_state(h, BEGUN, NEW)) || is_done(h) ||
	    rp_exiting == RP_CLOSED_ALL)
		return;
	if (rp_thread()->top)
		put_off(h, BY_CALLER);
	else
		close_quietly(h);
}

/*
 * _begin_making(): mark the constructor as begun; raise if another one has begun. Returns its number,
 * for _undo_making().
 */
static PyObject *handle_begin(PyObject *self, PyObject *unused)
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
	ask_main();
	return number;
}

/*
 * _undo_making(number): the constructor has failed, or an interrupt came just after it ended. Does
 * nothing if another constructor has begun since.
 */
static PyObject *handle_undo(PyObject *self, PyObject *number)
{
	struct rp_handle *h = (struct rp_handle *)self;

	if (PyLong_AsUnsignedLong(number) == RP_LOAD(&h->constructors))
		undo_making(h);
	return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/*
 * _construct(init, args, options): run a constructor. As in a verb, this thread's closes are deferred
 * until it ends; it fails if it would keep a parent from closing.
 */
static PyObject *handle_construct(PyObject *self, PyObject *args)
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
	/* After a fork in the constructor, the child is in none. */
	if (process == rp_process)
		rp_thread()->making--;
	/* An exception that is set stays set. */
	if (done)
		__atomic_store_n(&h->maker, 0, __ATOMIC_SEQ_CST);
	else
		undo_making(h);
	rp_close_deferred(rp_thread());
	return done;
}

/*
 * _make(create, args, destroy, parents, keeps=None, access=0, start=0, unreadable=False, form=None):
 * call create with args and take ownership of the struct it returns, as a child of each parent. Only
 * a memory region has a form.
 */
static PyObject *handle_make(PyObject *self, PyObject *args, PyObject *kwargs)
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
		drop_held(h, before);
	return made;
}

/* ---- using ---------------------------------------------------------------- */

/* _verb(function, *args): call function with this handle's struct and args. */
static PyObject *handle_verb(PyObject *self, PyObject *args)
{
	struct rp_use uses[MAX_ARGS];
	PyObject *function, *result;
	int used;

	function = PyTuple_GetItem(args, 0);
	if (!function)
		return NULL;
	result = call(function, self, args, uses, &used);
	end_uses(uses, used);
	return result;
}

/* Return a new reference to an object that a handle holds, or NULL (no exception) if closed. */
static PyObject *get_held(struct rp_handle *h, PyObject *const *held)
{
	PyObject *value;

	if (!enter(h, 1))
		return NULL;
	value = Py_NewRef(*held);
	leave(h, 1);
	return value;
}

/* _open_struct(): return the struct, or raise ClosedError. */
static PyObject *open_struct(PyObject *self, PyObject *unused)
{
	struct rp_handle *h = (struct rp_handle *)self;
	PyObject *cdata = get_held(h, &h->cdata);

	(void)unused;
	if (!cdata)
		rp_raise_closed(h);
	return cdata;
}

/* The struct, or None if closed. */
static PyObject *get_struct(PyObject *self, void *unused)
{
	struct rp_handle *h = (struct rp_handle *)self;
	PyObject *cdata = get_held(h, &h->cdata);

	(void)unused;
	return cdata ? cdata : Py_NewRef(Py_None);
}

/*
 * _peek(name): return an attribute of the struct, or None if closed; formats no message, so __str__
 * may use it.
 */
static PyObject *handle_peek(PyObject *self, PyObject *name)
{
	struct rp_handle *h = (struct rp_handle *)self;
	struct rp_use use;
	PyObject *value;

	if (rp_begin_use(h, &use))
		return Py_NewRef(Py_None);
	value = PyObject_GetAttr(h->cdata, name);
	rp_end_use(&use);
	return value;
}

static PyObject *get_closed(PyObject *self, void *unused)
{
	struct rp_handle *h = (struct rp_handle *)self;

	(void)unused;
	return PyBool_FromLong(h->process != rp_process || state_of(h) != OPEN);
}

static uintptr_t maker_of(PyObject *self)
{
	return __atomic_load_n(&((struct rp_handle *)self)->maker, __ATOMIC_SEQ_CST);
}

static PyObject *get_unfinished(PyObject *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(maker_of(self) != 0);
}

/* Whether this thread is in the handle's constructor, or no constructor has begun. */
static PyObject *get_making(PyObject *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(maker_of(self) == this_thread() ||
			       state_of((struct rp_handle *)self) == NEW);
}

static PyObject *get_parents(PyObject *self, void *unused)
{
	/* A region has parents even while it is re-registered: the device still has the region. */
	PyObject *parents = get_now(self, &((struct rp_handle *)self)->parents);

	(void)unused;
	return parents ? parents : PyTuple_New(0);
}

/* A memory region's key, which stays readable after a close; `at` is the member's offset. */
static PyObject *get_key(PyObject *self, void *at)
{
	const uint32_t *key = (const void *)((const char *)self + (size_t)at);

	if (state_of((struct rp_handle *)self) >= OPEN)
		return PyLong_FromUnsignedLong(RP_LOAD(key));
	PyErr_SetString(PyExc_AttributeError, "it has no keys yet");
	return NULL;
}

static PyObject *get_form(PyObject *self, void *unused)
{
	PyObject *form = get_now(self, &((struct rp_handle *)self)->form);

	(void)unused;
	return form ? form : Py_NewRef(Py_None);
}

static PyObject *get_replaced(PyObject *self, void *unused)
{
	PyObject *form = get_now(self, &((struct rp_handle *)self)->replaced);

	(void)unused;
	return form ? form : Py_NewRef(Py_None);
}

/* ---- closing -------------------------------------------------------------- */

/* Call a method that may raise; 0, or -1 with an exception. */
static int ask(struct rp_handle *h, const char *method)
{
	PyObject *done = PyObject_CallMethod((PyObject *)h, method, NULL);

	Py_XDECREF(done);
	return done ? 0 : -1;
}

/* A wait for other threads, with a time limit at exit. */
struct pause {
	long us; /* of the next sleep */
	long all_us;
};

/*
 * Sleep briefly and check for signals; 0, -1 with an exception, or 1 to stop: time is up, or this
 * is a forked child, which lacks the threads it waits for.
 */
static int sleep_on(const struct rp_handle *h, struct pause *pause)
{
	struct timespec time = { 0, pause->us * 1000 };

	if (rp_exiting && (pause->all_us += pause->us) > WAIT_AT_EXIT_US)
		return 1;
	Py_BEGIN_ALLOW_THREADS
	nanosleep(&time, NULL);
	Py_END_ALLOW_THREADS
	if (pause->us < LONGEST_PAUSE_US)
		pause->us *= 2;
	return PyErr_CheckSignals() ? -1 : h->process != rp_process;
}

/* Become the handle's closer, if it has none. */
static int claim(struct rp_handle *h)
{
	struct rp_thread *me = rp_thread();
	uintptr_t nobody = 0;

	if (!__atomic_compare_exchange_n(&h->closer, &nobody, this_thread(), 0, __ATOMIC_SEQ_CST,
					 __ATOMIC_SEQ_CST))
		return 0;
	h->outer = me->closing;
	me->closing = h;
	return 1;
}

static void end_claim(struct rp_handle *h)
{
	rp_thread()->closing = h->outer;
	__atomic_store_n(&h->closer, 0, __ATOMIC_SEQ_CST);
}

/*
 * For every handle that this thread is closing, record whether the thread is waiting for another
 * thread's close.
 */
static void set_stalled(char stalled)
{
	for (struct rp_handle *h = rp_thread()->closing; h; h = h->outer)
		__atomic_store_n(&h->stalled, stalled, __ATOMIC_SEQ_CST);
}

/*
 * Become the handle's closer, waiting for any other to finish. To avoid a deadlock, a thread in the
 * middle of a close leaves the handle to its closer if that closer is itself waiting.
 */
static int claim_in_turn(struct rp_handle *h, struct pause *pause)
{
	int stopped = 0;

	if (claim(h))
		return 0;
	RP_ADD(&h->claimants, 1);
	while (!stopped && !claim(h)) {
		set_stalled(1);
		if (is_closer(h) ||
		    (rp_thread()->closing && __atomic_load_n(&h->stalled, __ATOMIC_SEQ_CST)))
			stopped = 1;
		else
			stopped = sleep_on(h, pause);
	}
	set_stalled(0);
	RP_ADD(&h->claimants, -1);
	return stopped;
}

/*
 * Let waiting threads claim a handle: a thread that closes it in a loop would otherwise claim it
 * again before they wake.
 */
static void yield_claim(const struct rp_handle *h)
{
	struct timespec time = { 0, 2000L * LONGEST_PAUSE_US };

	if (!RP_LOAD(&h->claimants))
		return;
	Py_BEGIN_ALLOW_THREADS
	nanosleep(&time, NULL);
	Py_END_ALLOW_THREADS
}

/* Count a child in each parent's `destroyed` or `finished`; `counter` is the member's offset. */
static void count_ended(PyObject *parents, size_t counter)
{
	for (Py_ssize_t i = 0; i < PyTuple_Size(parents); i++)
		RP_ADD((unsigned int *)(void *)((char *)PyTuple_GetItem(parents, i) + counter), 1);
}

/*
 * Raise InUseError for a handle's children, or close those that nothing refers to. If no child is
 * listed, another thread may be finishing the close of one: wait for that thread. Returns 0 if the
 * number of children may have changed since `destroyed` was read; 1 if time is up; -1 with an
 * exception.
 */
static int refuse_children(struct rp_handle *h, struct pause *pause, unsigned int destroyed)
{
	PyObject *closed = PyObject_CallMethod((PyObject *)h, "_refuse_children", NULL);
	int unnamed = closed == Py_False;

	Py_XDECREF(closed);
	if (!unnamed)
		return closed ? 0 : -1;
	/* Do not wait in the middle of a close: the thread closing the children may wait for it. */
	if (!rp_thread()->closing &&
	    (RP_LOAD(&h->destroyed) != destroyed || RP_LOAD(&h->finished) != destroyed))
		return sleep_on(h, pause);
	PyErr_Format(rp_errors.in_use,
		     "%S cannot be closed: a resource on it is being created or closed", h);
	return -1;
}

/*
 * Become the handle's closer and admit no new users. Returns 0; 1 if it is closed, already being
 * closed by this thread, or left to another closer, or if time is up; -1 with an exception.
 */
static int shut(struct rp_handle *h, struct pause *pause)
{
	unsigned int destroyed;
	int stopped;
	uint64_t word;

again:
	stopped = claim_in_turn(h, pause);
	if (stopped)
		return stopped;
	destroyed = RP_LOAD(&h->destroyed);
	word = load(&h->word);
	while (state_of(h) == OPEN && !CHILDREN(word) &&
	       !__atomic_compare_exchange_n(&h->word, &word, word | SHUT, 0, __ATOMIC_SEQ_CST,
					    __ATOMIC_SEQ_CST))
		;
	if (state_of(h) == GONE || (state_of(h) == OPEN && CHILDREN(word))) {
		end_claim(h);
		if (state_of(h) == GONE)
			return 1;
		stopped = refuse_children(h, pause, destroyed);
		if (stopped)
			return stopped;
		goto again;
	}
	return 0;
}

/* Do everything that precedes destruction; 0, -1 with an exception, or 1 if time is up. */
static int release(struct rp_handle *h, struct pause *pause)
{
	/* Wake the threads that wait on the handle: their verbs, and all others, must end first. */
	if (ask(h, "_wake"))
		return -1;
	while (VERBS(load(&h->word))) {
		int stopped = sleep_on(h, pause);

		if (stopped)
			return stopped;
	}
	h->releasing = 1;
	if (ask(h, "_release"))
		return -1;
	/* _refuse_posted raises, or closes the queues that were only waiting to be closed. */
	while (load(&h->posted)) {
		if (!ask(h, "_refuse_posted"))
			continue;
		/* The last completion may have arrived since. */
		if (load(&h->posted) || !PyErr_ExceptionMatches(rp_errors.in_use))
			return -1;
		PyErr_Clear();
	}
	h->releasing = 0;
	return 0;
}

static int destroy(struct rp_handle *h)
{
	struct rp_use use;
	PyObject *result;
	int done;

	rp_push_use(rp_thread(), h, &use);
	result = PyObject_CallFunctionObjArgs(h->destroy, h->cdata, NULL);
	done = succeeded(h->destroy, result);
	/* No Python code has run since the call succeeded. */
	if (done) {
		h->address = NULL;
		h->kept = 0;
		count_ended(h->parents, offsetof(struct rp_handle, destroyed));
		set_state(h, DESTROYED);
		unlist(h);
	}
	h->refused = !done;
	Py_XDECREF(result);
	rp_pop_use(rp_thread(), &use);
	return done ? 0 : -1;
}

/*
 * Call a method until it completes: the device has already done its part. Returns whether it
 * completed, and sets `*raised` to the first exception; leaves none set.
 */
static int insist(struct rp_handle *h, const char *method, struct error *raised)
{
	struct error first = { NULL, NULL, NULL };
	PyObject *done = NULL;

	/* In a child that a signal handler has forked, the call may never complete: try once. */
	for (int i = 0; !done && i < MAX_INTERRUPTS && (!i || h->process == rp_process); i++) {
		done = PyObject_CallMethod((PyObject *)h, method, NULL);
		if (!first.type)
			first = save_error();
		PyErr_Clear();
	}
	/* A later attempt had enough memory or stack: drop the exception. */
	if (done && first.type && rp_lacks_room(first.type)) {
		restore_error(first);
		PyErr_Clear();
		first = save_error();
	}
	*raised = first;
	Py_XDECREF(done);
	return done != NULL;
}

/*
 * Call _forget(), then release every reference. An exception does not stop this, and stays set; if
 * _forget() did not succeed, the next close() does this again.
 */
static void finish(struct rp_handle *h)
{
	struct error first;
	int forgotten = insist(h, "_forget", &first);

	if (h->queues)
		h->forget(h->queues);
	if (h->parents) {
		leave_parents(h->parents, PyTuple_Size(h->parents));
		count_ended(h->parents, offsetof(struct rp_handle, finished));
	}
	drop_held(h, forgotten ? GONE : DESTROYED);
	restore_error(first);
}

/* The handle stays open after all. */
static void reopen(struct rp_handle *h)
{
	if (!h->spoiled)
		__atomic_and_fetch(&h->word, ~SHUT, __ATOMIC_SEQ_CST);
}

/* Close a handle now; 0, or -1 with an exception. */
static int close_now(struct rp_handle *h)
{
	struct pause pause = { 1, 0 };
	int stopped;

	ask_main();
	stopped = shut(h, &pause);
	if (stopped)
		return stopped < 0 ? -1 : 0;
	h->refused = 0;
	if (state_of(h) == OPEN)
		stopped = release(h, &pause) || h->process != rp_process || destroy(h);
	if (!stopped)
		finish(h);
	h->releasing = 0;
	if (stopped)
		reopen(h);
	end_claim(h);
	if (!rp_thread()->closing)
		rp_close_deferred(rp_thread());
	/* Interrupted, and no user is left to try again: defer the close. */
	if (stopped && h->abandoned && !h->refused && !is_busy(h) && !rp_thread()->draining)
		put_off(h, BY_FINALIZER);
	/* After a fork in the middle of the close, there is nothing to close here. */
	if (h->process != rp_process && PyErr_ExceptionMatches(rp_errors.error))
		PyErr_Clear();
	return PyErr_Occurred() ? -1 : 0;
}

/*
 * The device refused to destroy a handle's struct: keep the handle, its memory and its parents
 * until the process ends.
 */
static void keep(struct rp_handle *h)
{
	struct error error = save_error();
	PyObject *said;

	if (!__atomic_exchange_n(&h->kept, 1, __ATOMIC_SEQ_CST)) {
		if (list_as(h, (PyObject *)h))
			Py_INCREF((PyObject *)h);
		PyErr_Clear();
		said = PyObject_CallMethod((PyObject *)h, "_warn_kept", "O",
					   error.value ? error.value : Py_None);
		if (!said)
			PyErr_WriteUnraisable((PyObject *)h);
		Py_XDECREF(said);
	}
	restore_error(error);
}

/*
 * Handles whose close lacked stack or memory, for the main thread to close; the list holds
 * references.
 *
 * In CPython 3.11, a function that is traced or profiled repeats its first instruction for as long
 * as a pending call is queued; so if it runs in a pending call itself, it never ends. Therefore one
 * pending call closes all handles, and queues no other before its end.
 */
static struct rp_handle *for_main;
static unsigned int main_asked; /* the process + 1 whose pending call is queued or running, or 0 */

static int close_for_main(void *unused);

/*
 * Have the main thread close the handles in the list. If it cannot be asked now, the next call does
 * it: each constructor and each close calls this.
 */
static void ask_main(void)
{
	unsigned int process = rp_process + 1;

	if (RP_LOAD(&for_main) &&
	    __atomic_exchange_n(&main_asked, process, __ATOMIC_SEQ_CST) != process &&
	    Py_AddPendingCall(close_for_main, NULL))
		RP_STORE(&main_asked, 0);
}

/*
 * Whether this thread's functions are traced or profiled, as far as sys.gettrace() or
 * sys.getprofile() tells. Its C function is called directly, because there may be no stack for a
 * Python call.
 */
static int has_hook(const char *getter_name)
{
	PyObject *getter = Py_XNewRef(PySys_GetObject(getter_name)), *hook = NULL;
	int has;

	if (getter && PyCFunction_Check(getter) && PyCFunction_GetFlags(getter) == METH_NOARGS)
		hook = PyCFunction_GetFunction(getter)(PyCFunction_GetSelf(getter), NULL);
	has = hook != Py_None;
	Py_XDECREF(hook);
	Py_XDECREF(getter);
	PyErr_Clear();
	return has;
}

static void push_for_main(struct rp_handle *h)
{
	push(&for_main, h, &h->next_for_main);
}

static int close_for_main(void *unused)
{
	struct rp_handle *h, *next;
	int failed = 0, traced;

	(void)unused;
	/* A close that fails would be deferred again; rp_close_put_off() ends with ask_main(). */
	if (rp_thread()->draining) {
		RP_STORE(&main_asked, 0);
		return 0;
	}
	h = __atomic_exchange_n(&for_main, NULL, __ATOMIC_SEQ_CST);
	RP_STORE(&rp_delivery_waits, rp_process + 1);
	for (; h; h = next) {
		next = h->next_for_main;
		if (failed) {
			/* There would not be enough stack or memory for this one, either. */
			push_for_main(h);
			continue;
		}
		RP_STORE(&h->is_for_main, 0);
		close_abandoned(h);
		failed = RP_LOAD(&h->is_for_main);
		Py_DECREF((PyObject *)h);
	}
	/* A traced function that is about to start would call this again and again. */
	traced = RP_LOAD(&for_main) && (has_hook("gettrace") || has_hook("getprofile"));
	RP_STORE(&rp_delivery_waits, 0);
	RP_STORE(&main_asked, 0);
	rp_deliver_soon();
	if (!traced)
		ask_main();
	return 0;
}

/* Leave a handle to the main thread; returns 0 if it has been retried for long enough. */
static int put_off_to_main(struct rp_handle *h)
{
	int64_t now = rp_now_ns();

	if (!h->first_try)
		h->first_try = now;
	else if (now - h->first_try > RETRIES_NS)
		return 0;
	if (!__atomic_exchange_n(&h->is_for_main, 1, __ATOMIC_SEQ_CST)) {
		Py_INCREF((PyObject *)h);
		push_for_main(h);
	}
	ask_main();
	return 1;
}

/*
 * Close a handle when there is no caller to raise to; 0, or -1 with an exception. An exception that
 * does not recur on the next attempt came from a signal handler: it is passed to rp_raise_later().
 */
static int close_insistently(struct rp_handle *h)
{
	PyObject *first = NULL;
	int failed = close_now(h), refusals = 0, known = 0;

	for (int i = 1; failed && i < MAX_INTERRUPTS; i++) {
		known = PyErr_ExceptionMatches(rp_errors.error);
		/* An apparent refusal by the device may be a handler's exception: retry. */
		refusals += known && h->refused;
		if (PyErr_ExceptionMatches(PyExc_RecursionError) || refusals > 1 ||
		    (PyErr_ExceptionMatches(rp_errors.in_use) && is_busy(h)))
			break;
		/* An InUseError is stale here: the last user has left the close to this thread. */
		if (PyErr_ExceptionMatches(rp_errors.in_use) || first ||
		    PyErr_ExceptionMatches(PyExc_MemoryError))
			PyErr_Clear();
		else
			first = rp_take_exception();
		failed = close_now(h);
	}
	/* An error that recurs on every attempt is the close's own, not a signal handler's. */
	if (failed && first && (!known || PyErr_GivenExceptionMatches(first, rp_errors.error)))
		Py_CLEAR(first);
	rp_raise_later(first);
	return failed;
}

/* Close an unreachable handle. */
static void close_quietly(struct rp_handle *h)
{
	struct error error = save_error();
	int put_off, known;

	Py_INCREF((PyObject *)h);
	if (close_insistently(h)) {
		/* Short of stack or memory: retry in the main thread, for RETRIES_NS. */
		put_off = rp_lacks_room(PyErr_Occurred()) && put_off_to_main(h);
		known = PyErr_ExceptionMatches(rp_errors.error);
		/* If the handle is in use again, its last user closes it. */
		if (!put_off && state_of(h) == OPEN && !is_busy(h))
			keep(h);
		if (!put_off && !known)
			PyErr_WriteUnraisable((PyObject *)h);
	}
	PyErr_Clear();
	rp_deliver_soon();
	Py_DECREF((PyObject *)h);
	restore_error(error);
}

/* Pop the first handle whose close was deferred; returns a reference, or NULL. */
static struct rp_handle *next_put_off(struct rp_thread *me, char *who)
{
	struct rp_handle *h = me->first_put_off;

	if (!h)
		return NULL;
	me->first_put_off = h->next;
	if (!h->next)
		me->last_put_off = NULL;
	*who = __atomic_exchange_n(&h->put_off, NOBODY, __ATOMIC_SEQ_CST);
	return h;
}

static size_t count_put_off(const struct rp_thread *me)
{
	size_t count = 0;

	for (const struct rp_handle *h = me->first_put_off; h; h = h->next)
		count++;
	return count;
}

/* Run this thread's deferred closes. If one fails because its handle is in use, retry it later. */
void rp_close_put_off(void)
{
	struct error error = save_error();
	struct rp_thread *me = rp_thread();
	struct rp_handle *h;
	size_t in_use = 0; /* refusals since the last close that succeeded */
	int waits = 0, failed, left;
	char who;

	me->draining = 1;
	close_held_back();
	while (!waits && (h = next_put_off(me, &who))) {
		failed = 0;
		if (who == BY_FINALIZER)
			close_abandoned(h);
		else if (!is_done(h))
			failed = close_insistently(h);
		/* It is left to a close in progress, which may be interrupted. */
		left = who == BY_CALLER && !failed && !is_done(h);
		if (!failed && !left) {
			in_use = 0;
		} else if (left || (is_busy(h) && (me->closing || in_use <= count_put_off(me)))) {
			/* A handle that this thread is closing may use it: retry later. */
			waits = in_use++ > count_put_off(me);
			PyErr_Clear();
			put_off(h, BY_CALLER);
		} else {
			PyErr_WriteUnraisable((PyObject *)h);
		}
		if (!RP_LOAD(&h->put_off))
			RP_STORE(&h->emptied, 0);
		Py_DECREF((PyObject *)h);
	}
	/* This may have closed windows that held-back queue pairs are waiting for. */
	if (RP_LOAD(&rp_held_back))
		close_held_back();
	me->draining = 0;
	ask_main();
	rp_deliver_soon();
	restore_error(error);
}

static PyObject *handle_close(PyObject *self, PyObject *unused)
{
	struct rp_handle *h = (struct rp_handle *)self;
	int failed = 0;

	(void)unused;
	Py_INCREF(self);
	if (is_done(h) || rp_exiting == RP_CLOSED_ALL)
		;
	else if (rp_in_verb())
		put_off(h, BY_CALLER);
	else
		failed = close_now(h);
	Py_DECREF(self);
	return failed ? NULL : Py_NewRef(Py_None);
}

/* ---- registering again ----------------------------------------------------- */

/* The new state of a region. */
struct form {
	PyObject *parents, *keeps;
	unsigned int access;
	unsigned long long start;
	int unreadable;
	PyObject *form;
	PyObject *attributes; /* to set: a tuple of (member descriptor, object, value) */
};

enum { UNCHANGED, CHANGED, SPOILED };

/*
 * The state in which ibv_rereg_mr has left a region; `code` is the errno, or 0 if CHANGED or if an
 * exception is set. A failed call has spoiled the region unless its result says otherwise, or the
 * device does not have the verb.
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
	number = PyObject_GetAttrString(python.ffi, "errno");
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
 * Have Python release the memory of the replaced form. If that fails, it is tried again before the
 * next change, and when the region is closed. Returns the first exception, or none.
 */
static struct error settle(struct rp_handle *h)
{
	struct error error = { NULL, NULL, NULL };
	PyObject *replaced = NULL;

	if (!h->replaced || !insist(h, "_settle", &error))
		return error;
	RP_BEGIN(h);
	replaced = h->replaced;
	h->replaced = NULL;
	RP_END();
	Py_XDECREF(replaced);
	return error;
}

/*
 * Call the verb, once nothing uses the region. Release the old parents and memory only if the
 * device has the new ones; if it may have either, keep both. 0, or -1 with an exception.
 */
static int change(struct rp_handle *h, PyObject *function, PyObject *args, const struct form *new)
{
	PyObject *parents = h->parents, *keeps = h->keeps;
	PyObject *both_parents = PySequence_Concat(parents, new->parents);
	PyObject *both = PyTuple_Pack(2, keeps ? keeps : Py_None, new->keeps);
	struct rp_use uses[MAX_ARGS];
	PyObject *result;
	int used, now;
	long code;

	if (!both_parents || !both || check_attributes(new->attributes) || join_parents(new->parents)) {
		Py_XDECREF(both_parents);
		Py_XDECREF(both);
		return -1;
	}
	result = call(function, (PyObject *)h, args, uses, &used);
	/* No Python code runs from here until the handle records the outcome. */
	now = outcome(result, &code);
	RP_BEGIN(h);
	if (now == CHANGED) {
		h->replaced = h->form;
		h->form = Py_NewRef(new->form);
		read_keys(h);
		count_ended(parents, offsetof(struct rp_handle, destroyed));
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
	end_uses(uses, used);
	if (code)
		raise_failed(function, code);
	if (now == CHANGED) {
		restore_error(settle(h));
		leave_parents(parents, PyTuple_Size(parents));
		count_ended(parents, offsetof(struct rp_handle, finished));
	} else if (now == UNCHANGED) {
		leave_parents(new->parents, PyTuple_Size(new->parents));
	}
	if (now != UNCHANGED) {
		struct error error = save_error();

		Py_DECREF(parents);
		Py_XDECREF(keeps);
		restore_error(error);
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
static int wait_until_unused(struct rp_handle *h, struct pause *pause)
{
	PyObject *refused;

	while (VERBS(load(&h->word))) {
		int stopped = sleep_on(h, pause);

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
 * register a memory region again, by calling function with the struct and args, and make it a child
 * of the new parents. This waits until other threads' verbs on the region end, and refuses new ones;
 * it raises if work in flight or a window uses the region. Once the device has changed the region,
 * the handle has the new form and attributes, whatever is raised later; then _settle() is called.
 * Returns False, without calling function, if the parents are no longer the tuple
 * `before`, because another thread has changed the region meanwhile.
 */
static PyObject *handle_remake(PyObject *self, PyObject *args)
{
	struct rp_handle *h = (struct rp_handle *)self;
	struct pause pause = { 1, 0 };
	struct rp_use own;
	struct form new;
	PyObject *function, *values, *before;
	int failed, claimed, stale = 0;

	if (!PyArg_ParseTuple(args, "OO!OO!OIKpOO!", &function, &PyTuple_Type, &values, &before,
			      &PyTuple_Type, &new.parents, &new.keeps, &new.access, &new.start,
			      &new.unreadable, &new.form, &PyTuple_Type, &new.attributes))
		return NULL;
	if (rp_in_verb()) {
		PyErr_Format(rp_errors.in_use,
			     "%S cannot be registered again in the middle of a verb of this thread "
			     "(this is a signal handler or a finalizer)", h);
		return NULL;
	}
	if (is_done(h) || rp_exiting == RP_CLOSED_ALL) {
		rp_raise_closed(h);
		return NULL;
	}
	/* While this use lasts, closes by signal handlers and finalizers are deferred. */
	rp_push_use(rp_thread(), h, &own);
	failed = shut(h, &pause);
	claimed = !failed;
	if (claimed && state_of(h) == OPEN && !h->spoiled) {
		h->remaking = 1;
		failed = wait_until_unused(h, &pause);
		stale = h->parents != before;
		if (!failed && !stale)
			restore_error(settle(h));
		failed = failed || PyErr_Occurred();
		if (!failed && !stale)
			failed = change(h, function, values, &new);
	} else if (claimed) {
		failed = 1;
	}
	if (failed > 0 && !PyErr_Occurred())
		rp_raise_closed(h);
	if (claimed) {
		h->releasing = h->remaking = 0;
		if (state_of(h) == OPEN)
			reopen(h);
		end_claim(h);
	}
	rp_pop_use(rp_thread(), &own);
	if (claimed)
		yield_claim(h);
	return failed ? NULL : PyBool_FromLong(!stale);
}

/* The default implementation of the hooks. */
static PyObject *do_nothing(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	Py_RETURN_NONE;
}

/* ---- the type ------------------------------------------------------------- */

static PyObject *handle_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static uint64_t serials;
	struct rp_handle *h = (struct rp_handle *)PyType_GenericAlloc(type, 0);

	(void)args;
	(void)kwargs;
	if (h) {
		h->serial = RP_ADD(&serials, 1);
		h->word = SHUT;
	}
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
	Py_VISIT(h->queues);
	Py_VISIT(h->form);
	Py_VISIT(h->replaced);
	for (struct rp_bound *b = h->bound; b; b = b->next)
		Py_VISIT((PyObject *)b->mr);
	return 0;
}

static void handle_finalize(PyObject *self)
{
	struct rp_handle *h = (struct rp_handle *)self;

	__atomic_store_n(&h->abandoned, 1, __ATOMIC_SEQ_CST);
	if (hold_back(h))
		return;
	/*
	 * This close is deferred until this thread's verb ends or the last user leaves. List the
	 * handle for the close of a parent, which may come earlier.
	 */
	if (state_of(h) == OPEN && (rp_thread()->top || is_busy(h)))
		list_again(h);
	close_abandoned(h);
}

static void handle_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	struct rp_handle *h = (struct rp_handle *)self;
	freefunc release_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);

	PyObject_GC_UnTrack(self);
	if (state_of(h) == OPEN)
		unlist(h);
	/*
	 * If it is still open, the interpreter is exiting and the device still uses the
	 * struct, so the objects that the struct depends on must stay.
	 */
	if (state_of(h) != OPEN || h->process != rp_process) {
		Py_XDECREF(h->cdata);
		Py_XDECREF(h->destroy);
		Py_XDECREF(h->parents);
		Py_XDECREF(h->keeps);
		Py_XDECREF(h->queues);
		Py_XDECREF(h->form);
		Py_XDECREF(h->replaced);
		unbind(h->bound);
		rp_drop_binder(h->binder);
	}
	release_memory(self);
	Py_DECREF(type);
}

static PyMethodDef handle_methods[] = {
	{ "_make", (PyCFunction)(void (*)(void))handle_make, METH_VARARGS | METH_KEYWORDS, NULL },
	{ "_begin_making", handle_begin, METH_NOARGS, NULL },
	{ "_construct", handle_construct, METH_VARARGS, NULL },
	{ "_undo_making", handle_undo, METH_O, NULL },
	{ "_verb", handle_verb, METH_VARARGS, NULL },
	{ "_peek", handle_peek, METH_O, NULL },
	{ "_remake", handle_remake, METH_VARARGS, NULL },
	{ "_unbind_invalidated", handle_unbind_invalidated, METH_NOARGS, NULL },
	{ "_open_struct", open_struct, METH_NOARGS, "Return the struct, or raise ClosedError." },
	{ "close", handle_close, METH_NOARGS,
	  "close($self, /)\n--\n\nRelease the resource.  Calling it again does nothing.\n\n"
	  "It waits for other threads' verbs and for a concurrent close() of the same resource;\n"
	  "if waiting could deadlock with that close(), it returns at once and the other thread\n"
	  "finishes the job.  In the middle of a verb of this thread (a signal handler, a\n"
	  "finalizer) it returns at once, and the resource is closed when the verb ends.  In the\n"
	  "child of a fork it does nothing.  If it was interrupted, call it again.\n\n"
	  "Raises:\n"
	  "    InUseError: other open resources depend on it; it stays open.\n"
	  "    VerbsError: the device refused; it stays open.\n" },
	{ "_wake", do_nothing, METH_NOARGS, NULL },
	{ "_release", do_nothing, METH_NOARGS, NULL },
	{ "_forget", do_nothing, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef handle_getset[] = {
	{ "_handle", get_struct, NULL, NULL, NULL },
	{ "_parents", get_parents, NULL, NULL, NULL },
	{ "_lkey", get_key, NULL, NULL, (void *)offsetof(struct rp_handle, lkey) },
	{ "_rkey", get_key, NULL, NULL, (void *)offsetof(struct rp_handle, rkey) },
	{ "_form", get_form, NULL, NULL, NULL },
	{ "_replaced", get_replaced, NULL, NULL, NULL },
	{ "_unfinished", get_unfinished, NULL, NULL, NULL },
	{ "_making", get_making, NULL, NULL, NULL },
	{ "closed", get_closed, NULL, "Whether it has been closed.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMemberDef handle_members[] = {
	/* Whether the handle's last user closes it. */
	{ "_abandoned", T_BOOL, offsetof(struct rp_handle, abandoned), 0, NULL },
	{ "_pid", T_INT, offsetof(struct rp_handle, pid), READONLY, NULL },
	/* Whether the handle can only be closed. */
	{ "_spoiled", T_BOOL, offsetof(struct rp_handle, spoiled), READONLY, NULL },
	/* Missing until own_queues() has been called. */
	{ "_in_flight", T_OBJECT_EX, offsetof(struct rp_handle, queues), READONLY, NULL },
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

/* ---- finalizers in Python -------------------------------------------------- */

/*
 * Call _finalize() until it completes: a signal handler may raise in the middle of it, and a
 * __del__ would lose that exception, so it is raised later, in the main thread. An exception that
 * recurs on every attempt is not a handler's. At exit, when modules may have been cleared,
 * exceptions mean nothing: the kernel closes what is left.
 */
static void finalizer_finalize(PyObject *self)
{
	struct error error = save_error(), first = { NULL, NULL, NULL };
	PyObject *done = NULL;

	for (int i = 0; !done && i < MAX_INTERRUPTS; i++) {
		done = PyObject_CallMethod(self, "_finalize", NULL);
		if (!done && PyErr_ExceptionMatches(PyExc_Warning)) {
			PyErr_WriteUnraisable(self);
			done = Py_NewRef(Py_None);
		}
		if (!done && !first.type)
			first = save_error();
		PyErr_Clear();
	}
	restore_error(first);
	if (done && PyErr_Occurred())
		rp_handler_raised();
	else if (!done && rp_exiting != RP_CLOSED_ALL)
		PyErr_WriteUnraisable(self);
	PyErr_Clear();
	Py_XDECREF(done);
	rp_deliver_soon();
	restore_error(error);
}

static PyType_Slot finalizer_slots[] = {
	{ Py_tp_finalize, finalizer_finalize },
	{ 0, NULL },
};

/*
 * Finalizing(finalizer, bind): a subclass's __del__, which calls the subclass's finalizer and then
 * handle_finalize(), even if a signal handler raises before the former has begun. `bind` is
 * types.MethodType.
 */
struct finalizing {
	PyObject_HEAD
	PyObject *finalizer, *bind;
};

static PyObject *finalizing_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	PyObject *finalizer, *bind;
	struct finalizing *f;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "OO", &finalizer, &bind))
		return NULL;
	f = (struct finalizing *)PyType_GenericAlloc(type, 0);
	if (f) {
		f->finalizer = Py_NewRef(finalizer);
		f->bind = Py_NewRef(bind);
	}
	return (PyObject *)f;
}

static PyObject *finalizing_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
	/* The collector may clear the member during the call. */
	PyObject *finalizer = Py_XNewRef(((struct finalizing *)self)->finalizer);
	PyObject *result = finalizer ? PyObject_Call(finalizer, args, kwargs) : Py_NewRef(Py_None);
	PyObject *resource = PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : NULL;

	if (resource && rp_is_handle(resource)) {
		struct error error = save_error();

		handle_finalize(resource);
		restore_error(error);
	}
	Py_XDECREF(finalizer);
	return result;
}

static PyObject *finalizing_get(PyObject *self, PyObject *resource, PyObject *type)
{
	(void)type;
	if (!resource || !((struct finalizing *)self)->bind)
		return Py_NewRef(self);
	return PyObject_CallFunctionObjArgs(((struct finalizing *)self)->bind, self, resource, NULL);
}

static int finalizing_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct finalizing *)self)->finalizer);
	Py_VISIT(((struct finalizing *)self)->bind);
	return 0;
}

static int finalizing_clear(PyObject *self)
{
	Py_CLEAR(((struct finalizing *)self)->finalizer);
	Py_CLEAR(((struct finalizing *)self)->bind);
	return 0;
}

static void finalizing_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	finalizing_clear(self);
	rp_free(self);
}

static PyType_Slot finalizing_slots[] = {
	{ Py_tp_new, finalizing_new },
	{ Py_tp_call, finalizing_call },
	{ Py_tp_descr_get, finalizing_get },
	{ Py_tp_traverse, finalizing_traverse },
	{ Py_tp_clear, finalizing_clear },
	{ Py_tp_dealloc, finalizing_dealloc },
	{ 0, NULL },
};

/* ---- functions for Python ------------------------------------------------- */

/* importing(): raise ImportError in a second interpreter, or for a second copy of the package. */
static PyObject *importing(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	/*
	 * Handles are per process. The module's own init cannot check this: newer Pythons
	 * run it in the main interpreter.
	 */
	if (PyInterpreterState_GetID(PyInterpreterState_Get())) {
		PyErr_SetString(PyExc_ImportError,
				"rdmapost works in the main interpreter of a process only");
		return NULL;
	}
	if (python.open) {
		PyErr_SetString(PyExc_ImportError,
				"rdmapost can be imported once in a process; it has been, and its "
				"modules were forgotten or belong to another interpreter");
		return NULL;
	}
	Py_RETURN_NONE;
}

/*
 * describe_handles(ClosedError, RdmaError, InUseError, failed, ffi, to_number, open, type_of,
 * structs): store these; never released
 */
static PyObject *describe_handles(PyObject *self, PyObject *args)
{
	(void)self;
	if (!PyArg_ParseTuple(args, "OOOOOOO!OO!", &rp_errors.closed, &rp_errors.error,
			      &rp_errors.in_use, &python.failed, &python.ffi, &python.to_number,
			      &PyDict_Type, &python.open, &python.type_of, &PyDict_Type, &python.structs))
		return NULL;
	return Py_NewRef(Py_NewRef(args));
}

/*
 * exiting(closed_all): the interpreter is about to close all handles, or has tried to. Those still
 * open after that are left open: threads that no longer run may hold the locks that a close needs.
 */
static PyObject *exiting(PyObject *self, PyObject *closed_all)
{
	PyObject *listed;

	(void)self;
	rp_exiting = closed_all == Py_True ? RP_CLOSED_ALL : RP_CLOSING_ALL;
	if (rp_exiting != RP_CLOSED_ALL)
		Py_RETURN_NONE;
	listed = PyDict_Values(python.open);
	for (Py_ssize_t i = 0; listed && i < PyList_Size(listed); i++) {
		PyObject *one = PyList_GetItem(listed, i);
		PyObject *handle = rp_is_handle(one) ? Py_NewRef(one) : PyObject_CallNoArgs(one);

		if (handle && rp_is_handle(handle))
			give_up((struct rp_handle *)handle);
		Py_XDECREF(handle);
	}
	Py_XDECREF(listed);
	return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/*
 * admit_children(handles, whether): let the handles of a list have no more children while they are
 * all being closed, or a thread that creates some without end would keep them open. A handle whose
 * close is deferred has none until that has been tried. Runs no Python code.
 */
static PyObject *admit_children(PyObject *self, PyObject *args)
{
	PyObject *handles;
	int admitted;

	(void)self;
	if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &handles, &admitted))
		return NULL;
	for (Py_ssize_t i = 0; i < PyList_Size(handles); i++) {
		struct rp_handle *one = (struct rp_handle *)PyList_GetItem(handles, i);

		if (rp_is_handle((PyObject *)one))
			RP_STORE(&one->emptied, !admitted || RP_LOAD(&one->put_off));
	}
	Py_RETURN_NONE;
}

/*
 * defer_closes(handles): if this thread is in the middle of a close, close the handles of a list after
 * it; return whether it is.
 */
static PyObject *defer_closes(PyObject *self, PyObject *handles)
{
	(void)self;
	if (!PyList_Check(handles)) {
		PyErr_SetString(PyExc_TypeError, "not a list of handles");
		return NULL;
	}
	if (!rp_thread()->closing)
		Py_RETURN_FALSE;
	for (Py_ssize_t i = 0; i < PyList_Size(handles); i++) {
		PyObject *one = PyList_GetItem(handles, i);

		if (rp_is_handle(one))
			put_off((struct rp_handle *)one, BY_CALLER);
	}
	Py_RETURN_TRUE;
}

/* in_verb(): whether this thread is in the middle of a verb or a constructor. */
static PyObject *in_verb(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	return PyBool_FromLong(rp_in_verb());
}

static PyMethodDef functions[] = {
	{ "importing", importing, METH_NOARGS, NULL },
	{ "describe_handles", describe_handles, METH_VARARGS, NULL },
	{ "exiting", exiting, METH_O, NULL },
	{ "admit_children", admit_children, METH_VARARGS, NULL },
	{ "defer_closes", defer_closes, METH_O, NULL },
	{ "in_verb", in_verb, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_handle(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.Handle", sizeof(struct rp_handle),
			   Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, handle_slots, &rp_handle_type) ||
	       rp_add_type(module, "rdmapost._verbs.Finalizing", sizeof(struct finalizing),
			   Py_TPFLAGS_HAVE_GC, finalizing_slots, NULL) ||
	       rp_add_type(module, "rdmapost._verbs.Finalizer", sizeof(PyObject),
			   Py_TPFLAGS_BASETYPE, finalizer_slots, NULL) ||
	       PyModule_AddFunctions(module, functions) ? -1 : 0;
}
