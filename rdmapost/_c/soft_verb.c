/*
 * What runs under the soft device's lock: verbs, and what they set going.
 *
 * A control verb is one step, and what its Python function raises comes out of
 * it, with nothing changed.  What a data verb sets going are steps too, of a
 * work request each; there an exception is either a signal handler's, and then
 * the step is made again, or a fault of the device's.  Which of the two it is
 * shows on another thread, for handlers run in the main thread only.
 */
#include "soft_device.h"

#include "handle.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

/* What the device is, as rdmapost/providers/soft_state.py gave it. */
static struct {
	PyObject *objects; /* a dict: what the structs stand for, by handle */
	PyObject *step; /* carry out a part of what an object has to do */
	PyObject *broken; /* end it, when that failed: (object, exception) */
	PyObject *tell; /* log what was broken */
	PyObject *reset; /* forget what was there before a fork */
	PyObject *refuse; /* make the exception of a nested verb: (name) */
} device;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* The thread that runs Python under the lock, or 0. */
static unsigned long owner;

static struct fifo *ready; /* objects that have something to do */
static double due = -1; /* when something has, by the monotonic clock; -1 is never */
static int broken; /* there is something to tell */
static int forked; /* nothing of what is there is this process's */
static int doomed; /* the verb that runs began in another process */

static unsigned long this_thread(void)
{
	return (unsigned long)pthread_self();
}

static void own(unsigned long thread)
{
	__atomic_store_n(&owner, thread, __ATOMIC_RELAXED);
}

int rp_soft_busy(void)
{
	return __atomic_load_n(&owner, __ATOMIC_RELAXED) == this_thread();
}

/* ---- exceptions of signal handlers --------------------------------------- */

static PyObject *raised; /* a list, for the main thread; or NULL */

/* Return the exception that is set, and clear it. */
static PyObject *take_exception(void)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace);
	PyErr_NormalizeException(&type, &value, &trace);
	if (value && trace)
		PyException_SetTraceback(value, trace);
	Py_XDECREF(type);
	Py_XDECREF(trace);
	return value;
}

static int deliver(void *unused)
{
	PyObject *first = NULL;

	(void)unused;
	if (raised && PyList_Size(raised) > 0) {
		first = Py_NewRef(PyList_GetItem(raised, 0));
		PyList_SetSlice(raised, 0, 1, NULL);
		if (PyList_Size(raised) > 0)
			Py_AddPendingCall(deliver, NULL);
	}
	if (!first)
		return 0;
	PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(first)), first,
		      PyException_GetTraceback(first));
	return -1;
}

/* Whether one of its type waits: of a handler that raises every time, the first is told. */
static int waits(PyObject *exception)
{
	for (Py_ssize_t i = 0; i < PyList_Size(raised); i++)
		if (Py_TYPE(PyList_GetItem(raised, i)) == Py_TYPE(exception))
			return 1;
	return 0;
}

/* Have an exception raised in this thread when the verb is over; takes the reference. */
static void raise_later(PyObject *exception)
{
	if (!exception)
		return;
	if (gettid() != getpid()) {
		/* It came by PyThreadState_SetAsyncExc, and goes so. */
		PyThreadState_SetAsyncExc(PyThread_get_thread_ident(),
					  (PyObject *)Py_TYPE(exception));
	} else {
		if (!raised)
			raised = PyList_New(0); /* held for ever */
		if (!raised || (!waits(exception) &&
				PyList_Append(raised, exception)))
			PyErr_Clear();
	}
	Py_DECREF(exception);
}

int rp_soft_raises(void)
{
	return raised && PyList_Size(raised) > 0 && gettid() == getpid();
}

/* ---- steps --------------------------------------------------------------- */

struct errand {
	PyObject *callable, *args;
	PyObject *result, *exception;
	PyThread_type_lock done;
	struct rp_thread *sender;
};

static void run(struct errand *errand)
{
	own(this_thread());
	rp_journal_begin();
	errand->result = PyObject_CallObject(errand->callable, errand->args);
	if (errand->result && !doomed) {
		rp_journal_commit();
		return;
	}
	rp_journal_rollback();
	errand->exception = take_exception();
}

static void run_elsewhere(void *errand)
{
	struct rp_thread *sender = ((struct errand *)errand)->sender;
	PyGILState_STATE gil = PyGILState_Ensure();

	/* Finalizers run here, too: they must not wait for what the sender holds. */
	rp_stand_for(sender);
	run(errand);
	rp_stand_for(NULL);
	PyGILState_Release(gil);
	PyThread_release_lock(((struct errand *)errand)->done);
}

/* Whether threads no longer get the GIL. */
static int is_finalizing(void)
{
	PyObject *ask = PySys_GetObject("is_finalizing"), *said;
	int is = 1;

	said = ask ? PyObject_CallObject(ask, NULL) : NULL;
	if (said)
		is = PyObject_IsTrue(said);
	Py_XDECREF(said);
	PyErr_Clear();
	return is;
}

/* Run on a thread of its own; whether that could be done. */
static int send(struct errand *errand)
{
	unsigned long here = owner;
	int sent;

	if (is_finalizing())
		return 0;
	errand->done = PyThread_allocate_lock();
	if (!errand->done)
		return 0;
	PyThread_acquire_lock(errand->done, WAIT_LOCK);
	sent = PyThread_start_new_thread(run_elsewhere, errand) !=
	       (unsigned long)-1;
	if (sent) {
		Py_BEGIN_ALLOW_THREADS
		PyThread_acquire_lock(errand->done, WAIT_LOCK);
		Py_END_ALLOW_THREADS
		own(here);
	}
	PyThread_release_lock(errand->done);
	PyThread_free_lock(errand->done);
	return sent;
}

/* Returns a new reference, or NULL with the device's fault in *fault, which may be NULL. */
static PyObject *step(PyObject *callable, PyObject *args, PyObject **fault)
{
	struct errand errand = { callable, args, NULL, NULL, NULL,
				 rp_thread() };
	PyObject *first;

	run(&errand);
	if (errand.result || doomed) {
		/* The process forked in a handler that raised: its child goes on with that. */
		raise_later(errand.exception);
		return errand.result;
	}
	first = errand.exception;
	errand.exception = NULL;
	if (!send(&errand))
		run(&errand);
	if (errand.result) {
		raise_later(first);
	} else {
		Py_XDECREF(first);
		if (fault)
			*fault = errand.exception;
		else
			Py_XDECREF(errand.exception);
	}
	return errand.result;
}

PyObject *rp_soft_step(PyObject *callable)
{
	return step(callable, NULL, NULL);
}

/* Carry out a part of what an object has to do; whether there is more. */
static int work(PyObject *object)
{
	PyObject *args = PyTuple_Pack(1, object), *fault = NULL, *more = NULL;
	int is_more = 0;

	if (args)
		more = step(device.step, args, &fault);
	if (more)
		is_more = PyObject_IsTrue(more);
	Py_XDECREF(args);
	Py_XDECREF(more);
	if (!fault)
		return is_more;
	args = PyTuple_Pack(2, object, fault);
	Py_DECREF(fault);
	more = args ? step(device.broken, args, NULL) : NULL;
	if (more)
		is_more = PyObject_IsTrue(more);
	broken = 1;
	Py_XDECREF(args);
	Py_XDECREF(more);
	return is_more;
}

/* ---- what waits until the verb is over ----------------------------------- */

/* A post, slots that a poll has freed, or a CQ that is to be armed. */
struct parcel {
	struct parcel *next;
	struct work_queue *queue, *slots;
	PyObject *wqe, *object;
	unsigned int frees;
	int arm;
};

static struct parcel *first_parcel, **last_parcel = &first_parcel;

static int put_aside(struct parcel what)
{
	struct parcel *parcel = malloc(sizeof(*parcel)); /* freed by unpack */

	if (!parcel)
		return ENOMEM;
	what.next = NULL;
	Py_XINCREF((PyObject *)what.queue);
	Py_XINCREF((PyObject *)what.slots);
	Py_XINCREF(what.wqe);
	Py_XINCREF(what.object);
	*parcel = what;
	*last_parcel = parcel;
	last_parcel = &parcel->next;
	return 0;
}

/* After a fork: what has been put aside stays the parent's. */
static void abandon_parcels(void)
{
	first_parcel = NULL;
	last_parcel = &first_parcel;
}

static void free_now(struct work_queue *queue, unsigned int count)
{
	queue->used -= count < queue->used ? count : queue->used;
}

static int accept_now(struct work_queue *queue, struct work_queue *slots,
		      PyObject *wqe)
{
	if (rp_fifo_push(&queue->pending, wqe)) {
		PyErr_Clear();
		return ENOMEM;
	}
	queue->used++;
	if (slots)
		slots->used++;
	return 0;
}

static void start_now(PyObject *object)
{
	if (rp_fifo_push(ready, object))
		PyErr_Clear();
}

static void arm_now(struct completion_ring *ring, int how)
{
	/* A pending wish for any entry is not narrowed. */
	if (how > ring->armed)
		ring->armed = how;
}

static void unpack(void)
{
	while (first_parcel) {
		struct parcel *parcel = first_parcel;

		first_parcel = parcel->next;
		if (!first_parcel)
			last_parcel = &first_parcel;
		if (parcel->wqe) {
			parcel->queue->incoming--;
			if (parcel->slots)
				parcel->slots->incoming--;
			/* What has been destroyed or reset since forgets it. */
			if (!parcel->queue->refuses)
				accept_now(parcel->queue, parcel->slots,
					   parcel->wqe);
		} else if (parcel->arm) {
			arm_now((void *)parcel->object, parcel->arm);
		} else if (parcel->queue) {
			free_now(parcel->queue, parcel->frees);
		} else {
			start_now(parcel->object);
		}
		Py_XDECREF((PyObject *)parcel->queue);
		Py_XDECREF((PyObject *)parcel->slots);
		Py_XDECREF(parcel->wqe);
		Py_XDECREF(parcel->object);
		free(parcel);
	}
}

int rp_soft_accept(int nested, struct work_queue *queue,
		   struct work_queue *slots, PyObject *wqe)
{
	struct parcel parcel = { .queue = queue, .slots = slots, .wqe = wqe };

	if (!nested)
		return accept_now(queue, slots, wqe);
	if (put_aside(parcel))
		return ENOMEM;
	queue->incoming++;
	if (slots)
		slots->incoming++;
	return 0;
}

void rp_soft_free_slots(int nested, struct work_queue *queue,
			unsigned int count)
{
	struct parcel parcel = { .queue = queue, .frees = count };

	if (!nested || put_aside(parcel))
		free_now(queue, count);
}

void rp_soft_arm(int nested, struct completion_ring *ring, int how)
{
	struct parcel parcel = { .object = (PyObject *)ring, .arm = how };

	if (!nested || put_aside(parcel))
		arm_now(ring, how);
}

void rp_soft_start(int nested, PyObject *object)
{
	struct parcel parcel = { .object = object };

	if (!nested || put_aside(parcel))
		start_now(object);
}

/* ---- verbs --------------------------------------------------------------- */

static int is_due(void)
{
	struct timespec now;

	if (due < 0)
		return 0;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec * 1e-9 >= due;
}

static void carry_on(void)
{
	PyObject *object;

	unpack();
	while (!doomed && (object = rp_fifo_pop(ready))) {
		while (work(object))
			unpack();
		Py_DECREF(object);
		unpack();
	}
}

/* Once in a verb: what is tried again may at once be due again. */
static void progress(void)
{
	if (is_due()) {
		due = -1;
		work(Py_None);
		carry_on();
	}
}

int rp_soft_enter(void)
{
	if (rp_soft_busy())
		return 1;
	if (pthread_mutex_trylock(&lock)) {
		Py_BEGIN_ALLOW_THREADS
		pthread_mutex_lock(&lock);
		Py_END_ALLOW_THREADS
	}
	own(this_thread());
	if (forked) {
		PyObject *done = rp_soft_step(device.reset);

		forked = done == NULL;
		Py_XDECREF(done);
	}
	progress();
	return 0;
}

void rp_soft_leave(int nested)
{
	PyObject *told;
	int tell;

	if (nested)
		return;
	if (ready->count || first_parcel)
		carry_on();
	tell = broken;
	broken = doomed = 0;
	own(0);
	pthread_mutex_unlock(&lock);
	if (tell) {
		told = PyObject_CallObject(device.tell, NULL);
		if (!told)
			raise_later(take_exception());
		Py_XDECREF(told);
	}
	/* It finds no room if others fill all of it: then the next verb's end tries again. */
	if (raised && PyList_Size(raised) > 0)
		Py_AddPendingCall(deliver, NULL);
}

/* The thread that forks goes on with what it is in the middle of; others are not there. */
static void after_fork(void)
{
	int mine = rp_soft_busy();

	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	forked = 1;
	due = -1;
	abandon_parcels();
	if (ready)
		ready->count = 0;
	if (mine) {
		doomed = 1;
		pthread_mutex_lock(&lock);
	} else {
		own(0);
		rp_journal_abandon();
	}
}

PyObject *rp_soft_object(uint32_t handle)
{
	PyObject *key = PyLong_FromUnsignedLong(handle), *found = NULL;

	if (key)
		found = Py_XNewRef(
			PyDict_GetItemWithError(device.objects, key));
	Py_XDECREF(key);
	PyErr_Clear();
	return found;
}

void *rp_soft_part(PyObject *object, const char *name, PyTypeObject *type)
{
	PyObject *part = PyObject_GetAttrString(object, name);

	if (part && type && !PyObject_TypeCheck(part, type))
		Py_CLEAR(part);
	PyErr_Clear();
	return part;
}

/* ---- control verbs ------------------------------------------------------- */

/* A method of the provider's as one step: all of it happens, or nothing and it raises. */
struct verb {
	PyObject_HEAD
	PyObject *function;
	PyObject *provider; /* or NULL */
};

static PyTypeObject *verb_type;

static PyObject *verb_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct verb *verb = (struct verb *)self;
	PyObject *result = NULL, *all, *type, *value, *trace, *name, *error;
	Py_ssize_t given = PyTuple_Size(args), bound = verb->provider != NULL;

	if (rp_soft_enter()) {
		name = PyObject_GetAttrString(verb->function, "__name__");
		error = name ? PyObject_CallFunctionObjArgs(device.refuse, name,
							    NULL) : NULL;
		if (error)
			PyErr_SetObject((PyObject *)Py_TYPE(error), error);
		Py_XDECREF(name);
		Py_XDECREF(error);
		return NULL;
	}
	all = PyTuple_New(given + bound);
	if (all && bound)
		PyTuple_SetItem(all, 0, Py_NewRef(verb->provider));
	for (Py_ssize_t i = 0; all && i < given; i++)
		PyTuple_SetItem(all, i + bound,
				Py_NewRef(PyTuple_GetItem(args, i)));
	rp_journal_begin();
	if (all)
		result = PyObject_Call(verb->function, all, kwargs);
	if (result && doomed) {
		Py_CLEAR(result);
		PyErr_SetString(PyExc_RuntimeError,
				"the process forked in the middle of a verb");
	}
	if (result)
		rp_journal_commit();
	else
		rp_journal_rollback();
	/* One that is returned, and not raised, takes nothing back. */
	if (result && PyExceptionInstance_Check(result)) {
		PyErr_SetObject((PyObject *)Py_TYPE(result), result);
		Py_CLEAR(result);
	}
	PyErr_Fetch(&type, &value, &trace);
	Py_XDECREF(all);
	rp_soft_leave(0);
	PyErr_Restore(type, value, trace);
	return result;
}

static PyObject *new_verb(PyTypeObject *type, PyObject *function,
			  PyObject *provider)
{
	struct verb *verb = (struct verb *)PyType_GenericAlloc(type, 0);

	if (verb) {
		verb->function = Py_NewRef(function);
		verb->provider = Py_XNewRef(provider);
	}
	return (PyObject *)verb;
}

static PyObject *verb_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	PyObject *function;

	(void)kwargs;
	return PyArg_ParseTuple(args, "O", &function) ?
		       new_verb(type, function, NULL) : NULL;
}

static PyObject *verb_get(PyObject *self, PyObject *provider, PyObject *type)
{
	(void)type;
	return provider ? new_verb(Py_TYPE(self),
				   ((struct verb *)self)->function, provider) :
			  Py_NewRef(self);
}

static PyObject *verb_getattro(PyObject *self, PyObject *name)
{
	PyObject *found = PyObject_GenericGetAttr(self, name);

	if (found || !PyErr_ExceptionMatches(PyExc_AttributeError))
		return found;
	PyErr_Clear();
	return PyObject_GetAttr(((struct verb *)self)->function, name);
}

static void verb_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	Py_XDECREF(((struct verb *)self)->function);
	Py_XDECREF(((struct verb *)self)->provider);
	PyObject_Free(self);
	Py_DECREF(type);
}

static PyType_Slot verb_slots[] = {
	{ Py_tp_new, verb_new },
	{ Py_tp_call, verb_call },
	{ Py_tp_descr_get, verb_get },
	{ Py_tp_getattro, verb_getattro },
	{ Py_tp_dealloc, verb_dealloc },
	{ 0, NULL },
};

static PyType_Spec verb_spec = {
	.name = "rdmapost._verbs.Verb",
	.basicsize = sizeof(struct verb),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = verb_slots,
};

/* ---- what Python calls --------------------------------------------------- */

/* soft_device(objects, step, broken, tell, reset, refuse) */
static PyObject *soft_device(PyObject *self, PyObject *args)
{
	(void)self;
	if (device.objects) {
		PyErr_SetString(PyExc_RuntimeError, "it is known already");
		return NULL;
	}
	if (!PyArg_ParseTuple(args, "O!OOOOO", &PyDict_Type, &device.objects,
			      &device.step, &device.broken, &device.tell,
			      &device.reset, &device.refuse))
		return NULL;
	/* Held for ever. */
	Py_INCREF(device.objects);
	Py_INCREF(device.step);
	Py_INCREF(device.broken);
	Py_INCREF(device.tell);
	Py_INCREF(device.reset);
	Py_INCREF(device.refuse);
	Py_RETURN_NONE;
}

/* start(object): let the device carry out what it has to do; for on_commit. */
static PyObject *start(PyObject *self, PyObject *object)
{
	(void)self;
	start_now(object);
	Py_RETURN_NONE;
}

/* come_back(seconds): let the device look at what is due then; for on_commit. */
static PyObject *come_back(PyObject *self, PyObject *seconds)
{
	(void)self;
	due = PyFloat_AsDouble(seconds);
	return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
	{ "soft_device", soft_device, METH_VARARGS, NULL },
	{ "start", start, METH_O, NULL },
	{ "come_back", come_back, METH_O, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_soft_verb(PyObject *module)
{
	/* Held for ever. */
	verb_type = (PyTypeObject *)PyType_FromSpec(&verb_spec);
	ready = (struct fifo *)PyType_GenericAlloc(rp_fifo_type, 0);
	if (!verb_type || !ready || pthread_atfork(NULL, NULL, after_fork) ||
	    PyModule_AddObjectRef(module, "Verb", (PyObject *)verb_type))
		return -1;
	return PyModule_AddFunctions(module, functions);
}
